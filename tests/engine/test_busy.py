import pytest
import torch

from shardwise.controller.process_group import Rank, process_group
from shardwise.engine import busy
from shardwise.engine.busy import BusyClock


@pytest.fixture
def clock_of_seconds(monkeypatch):
    """Lets so many seconds pass."""
    now = [100.0]
    monkeypatch.setattr(busy.time, "perf_counter", lambda: now[0])

    def pass_by(seconds):
        now[0] += seconds

    with process_group(Rank(0, 1, 0), device_type="cpu", timeout_seconds=60):
        yield pass_by


def results_of(clock):
    return {name: value.result() for name, value in clock.take().items()}


def test_what_is_waited_inside_a_phase_is_no_part_of_it(clock_of_seconds):
    clock = BusyClock(torch.device("cpu"))
    for seconds in (3.0, 4.0):
        with clock.phase("forward"):
            clock_of_seconds(seconds)
            for _ in range(2):
                with clock.waiting():
                    clock_of_seconds(50.0)
        with clock.waiting():
            clock_of_seconds(70.0)
    with clock.phase("backward"):
        clock_of_seconds(0.5)
    assert results_of(clock) == {"train/busy/forward/rank_0": 7.0, "train/busy/backward/rank_0": 0.5}
    assert clock.take() == {}


def test_collectives_that_overlap_never_make_less_than_nothing(clock_of_seconds):
    clock = BusyClock(torch.device("cpu"))
    with clock.phase("forward"), clock.waiting(), clock.waiting():
        clock_of_seconds(2.0)
    assert results_of(clock) == {"train/busy/forward/rank_0": 0.0}
