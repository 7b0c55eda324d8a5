import errno
import math
import os
import signal
import subprocess
import sys

import pytest
import torch

from shardwise import fault_plan
from shardwise.fault_plan import VARIABLE, Fault, FaultPlan, begin_plan, plan


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


def test_a_fault_with_a_step_counts_within_it():
    planned = FaultPlan([Fault.parse("step=7 phase=backward nth=2 action=raise")], rank=0)
    for step in (None, 6, 8):
        planned.step = step
        for _ in range(3):
            planned.enter("backward")
    planned.step = 7
    planned.enter("backward")
    planned.step = 7  # said again, it is no new one
    planned.enter("forward")
    with pytest.raises(RuntimeError, match="the fault plan raises in phase backward"):
        planned.enter("backward")
    planned.enter("backward")
    assert planned.entered == {"backward": 12, "forward": 1}


def test_slow_goes_on_from_the_n_th_time(monkeypatch):
    slept = []
    monkeypatch.setattr(fault_plan.time, "sleep", slept.append)
    planned = FaultPlan([Fault.parse("phase=forward nth=3 action=slow")], rank=0)
    in_step = FaultPlan([Fault.parse("step=2 phase=forward nth=2 action=slow")], rank=0)
    for one, num_times in ((planned, 4), (in_step, 2)):
        slept.clear()
        for step in (1, 2, 3):
            one.step = step
            for _ in range(2 if one is planned else 3):
                one.enter("forward")
        assert slept == [fault_plan.SLOW_SECONDS] * num_times


def test_nan_takes_the_place_of_the_first_number():
    planned = FaultPlan([Fault.parse("phase=backward nth=2 action=nan")], rank=0)
    tensor, numbers = torch.ones(2, 2), [1.0, 2.0]
    planned.enter("backward", tensor.view(-1))
    planned.enter("backward", numbers)
    planned.enter("backward", tensor.view(-1))
    assert tensor.tolist() == [[1, 1], [1, 1]]
    assert math.isnan(numbers[0])
    assert numbers[1] == 2
    FaultPlan([Fault.parse("phase=backward action=nan")], rank=0).enter("backward", tensor.view(-1))
    assert tensor.isnan().tolist() == [[True, False], [False, False]]


def test_faults_of_the_variable_and_of_the_config_are_planned_together_and_in_place_of_earlier_ones(monkeypatch):
    monkeypatch.setenv(VARIABLE, "phase=write action=raise")
    monkeypatch.setenv("RANK", "1")
    try:
        begin_plan(["rank=0 phase=prune action=raise", "rank=1 phase=commit action=raise"])
        plan().step = 3
        for phase in ("write", "commit"):
            with pytest.raises(RuntimeError, match=phase):
                fault_plan.fault_point(phase)
        fault_plan.fault_point("prune")
        monkeypatch.setenv(VARIABLE, "")
        begin_plan([])
        fault_plan.fault_point("write")
        assert (plan().step, plan().entered) == (None, {})
    finally:
        plan.cache_clear()


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
        ("phase=write step=0", "has step=0; give a number (step counts from 1)"),
        ("phase=write stp=3", "names 'stp'; a fault has rank, step, phase, nth and action"),
        ("phase=write action=nan", "has action=nan, and phase=write holds no numbers; choose one of reward, logprob,"),
        ("rank=1", "has no phase; choose one of rollout,"),
    ],
)
def test_a_fault_that_is_none_is_an_error_that_says_what_is(monkeypatch, text, message):
    monkeypatch.setenv(VARIABLE, f"phase=commit; {text}")
    with pytest.raises(ValueError) as error:  # noqa: PT011
        FaultPlan.from_environment()
    assert message in str(error.value)
    assert str(error.value).startswith(f"{VARIABLE}: '{text}' ")
