"""When a job that failed starts again, and when it gives up."""

import os
import sys
from pathlib import Path

import pytest

from shardwise.controller.failures import Failure
from shardwise.controller.launch import launch
from shardwise.controller.restarts import Restarts

KILLED = Failure("rank 1 was ended by SIGKILL")


@pytest.fixture
def marks():
    """What the newest checkpoint is, next to last."""
    return [None]


@pytest.fixture
def allowed(marks):
    def make(number: int) -> Restarts:
        return Restarts(number, command=["first"], resuming_command=["resuming"], newest_checkpoint=lambda: marks[-1])

    return make


def test_f8_a_budget_that_is_used_up_ends_with_the_history(allowed, marks, capsys):
    restarts = allowed(2)
    commands = []
    for step in (2, 4, 6):
        commands.append(restarts.after(Failure(f"lost in step {step}"), step))
        marks.append((f"run/step_{step}", step))
    assert commands == [["first"], ["resuming"], None]
    assert capsys.readouterr().err == (
        "error: lost in step 2\n"
        "restart 1 of 2: starts as before\n"
        "error: lost in step 4\n"
        "restart 2 of 2: resumes from run/step_2\n"
        "error: lost in step 6\n"
        "error: gave up after 2 restarts; the failures were:\n"
        "  1. lost in step 2\n  2. lost in step 4\n  3. lost in step 6\n"
    )


@pytest.mark.parametrize(
    ("step", "where"), [(5, "in step 5 without a new checkpoint"), (None, "before the first step")]
)
def test_f8_two_restarts_that_get_no_further_are_enough(allowed, capsys, step, where):
    restarts = allowed(50)
    assert [restarts.after(KILLED, step) for _ in range(3)] == [["first"], ["first"], None]
    assert f"error: gave up after 2 of 50 restarts, which all ended {where}" in capsys.readouterr().err


def test_progress_between_failures_keeps_a_job_alive(allowed, marks):
    """A new checkpoint, be it of the same step, or a later step without one."""
    restarts = allowed(50)
    for number in range(6):
        assert restarts.after(KILLED, 5) is not None
        marks.append(("run/step_4", number))
    for step in range(6, 12):
        assert restarts.after(KILLED, step) is not None


def test_a_checkpoint_from_before_the_job_is_not_its_own(marks, allowed):
    marks.append(("run/step_9", 1))
    restarts = allowed(3)
    assert restarts.after(KILLED, 1) == ["first"]
    marks.append(("run/step_9", 2))  # of the same step, written since
    assert restarts.after(KILLED, 1) == ["resuming"]


def test_mistakes_and_a_budget_of_0_start_nothing(allowed, capsys):
    assert allowed(3).after(Failure("no such file", 2, may_pass=False), None) is None
    assert allowed(0).after(KILLED, 3) is None
    assert capsys.readouterr().err == "error: no such file\nerror: rank 1 was ended by SIGKILL\n"


def test_launch_starts_all_ranks_again_until_they_succeed(allowed, tmp_path, capfd):
    """Rank 1 kills itself twice; rank 0 waits for it."""
    code = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
with (folder / f"starts-{rank}").open("a") as file:
    file.write(os.environ["SHARDWISE_STARTED"] + "\\n")
if rank == "1" and (folder / "starts-1").read_text().count("\\n") < 3:
    os.kill(os.getpid(), signal.SIGKILL)
while (folder / "starts-1").exists() and (folder / "starts-1").read_text().count("\\n") < 3:
    time.sleep(0.01)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    restarts = Restarts(2, command=command, resuming_command=[], newest_checkpoint=lambda: None)
    assert launch(command, nproc=2, restarts=restarts) == 0
    assert capfd.readouterr().err.count("error: rank 1 was ended by SIGKILL") == 2
    starts = [Path(tmp_path, f"starts-{rank}").read_text().split() for rank in (0, 1)]
    assert len(starts[1]) == 3
    assert len({*starts[0], *starts[1]}) == 1  # a time limit counts from the first start
    assert os.listdir(tmp_path)
