import time

import pytest

from shardwise.controller.stall import StallLimit, watching_itself
from shardwise.controller.watchdog import be_watched, commanded, enter_phase, enter_step, go_on


@pytest.fixture(autouse=True)
def _unwatched(monkeypatch):
    monkeypatch.delenv("SHARDWISE_JOB_FOLDER", raising=False)
    be_watched(0)


def stays(seconds, *, marks=lambda: None):
    """What `end` was called with while this rank stayed where it is, calling `marks` all the while."""
    ended = []
    with watching_itself(StallLimit.of("trainer.stall_timeout_seconds", 0.4), ended.append):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not ended:
            marks()
            time.sleep(0.01)
    return ended


def test_a_rank_that_does_not_go_on_is_ended_once():
    enter_step(3)
    enter_phase("rollout")
    (error,) = stays(30)
    assert str(error).startswith(
        "rank 0 has not gone on for 0 s (trainer.stall_timeout_seconds=0.4); if it is only slow"
    )


@pytest.mark.parametrize(
    "mark", [go_on, lambda: enter_step(4), lambda: enter_phase("train"), lambda: commanded("train", []).__enter__()]
)
def test_whatever_begins_or_goes_on_leaves_it_alone(mark):
    assert stays(1.2, marks=mark) == []


def test_a_wait_with_a_deadline_counts_from_there_on():
    began = time.monotonic()
    with commanded("generate", [], deadline_seconds=2):
        assert stays(1.2) == []
        assert len(stays(30)) == 1
    assert time.monotonic() - began > 2.4
    with commanded("train", []):
        assert len(stays(1.2)) == 1, "the deadline is that of the other command"


def test_without_a_limit_nothing_watches():
    with watching_itself(StallLimit.of("trainer.stall_timeout_seconds", None), pytest.fail):
        time.sleep(0.05)
