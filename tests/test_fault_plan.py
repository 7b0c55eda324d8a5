import errno
import os
import signal
import subprocess
import sys

import pytest

from shardwise.fault_plan import VARIABLE, Fault, FaultPlan, plan


def test_a_fault_happens_to_its_rank_in_its_phase_the_n_th_time():
    text = "rank=1 phase=backward nth=3 action=raise"
    here, elsewhere = (FaultPlan([Fault.parse(text)], rank=rank) for rank in (1, 0))
    for phase in ("forward", "backward", "forward", "backward", "forward"):
        here.enter(phase)
    with pytest.raises(RuntimeError, match="the fault plan raises in phase backward"):
        here.enter("backward")
    here.enter("backward")
    for _ in range(4):
        elsewhere.enter("backward")


@pytest.mark.parametrize(("action", "number"), [("enospc", errno.ENOSPC), ("eio", errno.EIO)])
def test_errors_of_the_file_system_are_those_that_it_raises(action, number):
    with pytest.raises(OSError, match=os.strerror(number)) as error:
        FaultPlan([Fault(phase="write", action=action)], rank=0).enter("write")
    assert error.value.errno == number


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("terminate", signal.SIGTERM)])
def test_signals_go_to_the_process_itself(action, number):
    code = "from shardwise.fault_plan import fault_point; fault_point('optim'); fault_point('optim'); print('alive')"
    environment = {**os.environ, VARIABLE: f"phase=optim nth=2 action={action}; rank=7 phase=optim", "RANK": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-number, "")


def test_without_the_variable_nothing_happens(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    none = FaultPlan.from_environment()
    none.enter("write")
    assert not none.entered
    assert not plan().entered


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("phase=bakward", "has phase=bakward; choose one of rollout, reward,"),
        ("phase=write action=explode", "has action=explode; choose one of kill, stop,"),
        ("phase=write nth=0", "has nth=0; give a number (nth counts from 1)"),
        ("phase=write rank=a", "has rank=a; give a number (rank counts from 0)"),
        ("phase=write step=3", "names 'step'; a fault has rank, phase, nth and action"),
        ("rank=1", "has no phase; choose one of rollout,"),
    ],
)
def test_a_fault_that_is_none_is_an_error_that_says_what_is(monkeypatch, text, message):
    monkeypatch.setenv(VARIABLE, f"phase=commit; {text}")
    with pytest.raises(ValueError) as error:  # noqa: PT011
        FaultPlan.from_environment()
    assert message in str(error.value)
    assert str(error.value).startswith(f"{VARIABLE}: '{text}' ")
