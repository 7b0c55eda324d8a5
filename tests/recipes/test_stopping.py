"""When a run stops between two steps; what Run does then is in test_run.py."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardwise.config import TrainerConfig
from shardwise.recipes import stopping
from shardwise.recipes.stopping import Stopping, without_saving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def at(monkeypatch):
    """Sets how long the job has been running."""
    return lambda seconds: monkeypatch.setattr("shardwise.recipes.stopping.seconds_since_start", lambda: seconds)


def test_f11_time_is_up_when_the_longest_step_and_the_last_save_no_longer_fit_in(at):
    stopping = Stopping(TrainerConfig(max_time_seconds=100))
    at(99.9)
    assert not stopping.is_due(save_seconds=None)  # nothing is known of steps
    for seconds in (5, 20, 10):
        stopping.count_step(seconds)
    at(59)
    assert not stopping.is_due(save_seconds=None)  # a save that was never seen counts as a step
    at(61)
    assert stopping.is_due(save_seconds=None)
    at(76.5)
    assert not stopping.is_due(save_seconds=3.0)
    at(77.5)
    assert stopping.is_due(save_seconds=3.0)
    stopped = stopping.stopped(7)
    assert (stopped.code, str(stopped)) == (
        75,
        "stopped for trainer.max_time_seconds=100; resumable: the same command continues after step 7",
    )


@pytest.mark.parametrize(("seconds", "told"), [([40, 29, 30], 0), ([1, 40, 2, 50], 1), ([40, 40, 40], 1)])
def test_steps_longer_than_the_grace_are_told_once_but_for_the_first(seconds, told, capsys):
    stopping = Stopping(TrainerConfig(stop_grace_seconds=30))
    for one in seconds:
        stopping.count_step(one)
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == told
    for warning in warnings:
        assert "this step took 40 s, and trainer.stop_grace_seconds=30" in warning


def test_without_a_limit_time_is_never_up(at):
    stopping = Stopping(TrainerConfig())
    stopping.count_step(1e9)
    at(1e9)
    assert not stopping.is_due(save_seconds=None)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, "stopped by SIGINT; resumable: the same command continues after step 7"),
        (
            {"resume": "never"},
            "stopped by SIGINT; resumable: the same command with trainer.resume=auto continues after step 7",
        ),
        ({"save_state": False}, "stopped by SIGINT after step 7; not resumable, for trainer.save_state=false"),
    ],
)
def test_a_signal_stops_and_its_name_and_the_way_on_are_told(options, how, capsys):
    with Stopping(TrainerConfig(**options)) as stopping:
        assert not stopping.is_due(save_seconds=None)
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 5
        while not stopping.is_due(save_seconds=None) and time.monotonic() < deadline:
            time.sleep(0.01)
    stopped = stopping.stopped(7)
    assert (stopped.code, str(stopped)) == (130, how)


LONG_STEP = f"""
import hashlib, sys
sys.path.insert(0, {str(ROOT)!r})
from shardwise.config import TrainerConfig
from shardwise.controller import signals
from shardwise.recipes.stopping import Stopping
signals.COPIES_SECONDS = 1.0
with Stopping(TrainerConfig(stop_grace_seconds=float(sys.argv[1]), output_dir=sys.argv[2])):
    print("in a step", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000_000)
"""


LATE = "trainer.stop_grace_seconds=0.3 were too few for the step and the checkpoint; ended"
UNDER_TORCHRUN = {"RANK": "0"}


@pytest.mark.parametrize(
    ("grace", "seconds_between", "variables", "reason"),
    [
        ("0.3", [], {}, LATE),
        ("30", [0.03], {}, "ended at once"),
        ("0.3", [0.03], UNDER_TORCHRUN, LATE),  # a copy of the first
        ("30", [0.03, 1.2], UNDER_TORCHRUN, "ended at once"),
        ("1.5", [1.2], UNDER_TORCHRUN | {"SHARDWISE_JOB_FOLDER": "job"}, LATE.replace("0.3", "1.5")),  # our launcher's
    ],
)
def test_f10_a_step_that_takes_too_long_and_a_second_signal_end_the_process(
    grace, seconds_between, variables, reason, tmp_path
):
    for step in (9, 10):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    others = {name: value for name, value in os.environ.items() if name not in ("RANK", "SHARDWISE_JOB_FOLDER")}
    process = subprocess.Popen(
        [sys.executable, "-c", LONG_STEP, grace, str(tmp_path)],
        env=others | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "in a step\n"
    process.terminate()
    for seconds in seconds_between:
        time.sleep(seconds)
        process.terminate()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert err.splitlines() == [
        "SIGTERM: saves and stops after this step",
        f"SIGTERM: {reason} without saving; the same command resumes from {tmp_path}/checkpoints/step_10",
    ]


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, "there is no checkpoint yet, so the same command starts as before"),
        ({"save_state": False}, "not resumable, for trainer.save_state=false"),
    ],
)
def test_a_run_that_could_not_save_and_has_nothing_to_go_on_from_says_so(tmp_path, options, how):
    trainer = TrainerConfig(output_dir=str(tmp_path), **options)
    assert without_saving(trainer) == f"without saving; {how}"


@pytest.mark.parametrize("fault", ["an error", "no answer"])
def test_a_file_system_that_fails_keeps_no_run_from_ending(tmp_path, monkeypatch, fault):
    answers = threading.Event()

    def look(run):
        if fault == "an error":
            raise OSError(errno.ESTALE, "stale")
        answers.wait(30)
        return {}

    monkeypatch.setattr(stopping, "step_folders", look)
    began = time.monotonic()
    said = without_saving(TrainerConfig(output_dir=str(tmp_path)))
    answers.set()
    assert said == f"without saving; the same command resumes from the newest checkpoint in {tmp_path}"
    assert time.monotonic() - began < 10


def test_a_run_that_could_not_save_goes_on_from_its_newest_checkpoint_if_it_may_look_for_it(tmp_path):
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    assert without_saving(TrainerConfig(output_dir=str(tmp_path), resume="never")) == (
        f"without saving; the same command with trainer.resume=auto resumes from {tmp_path}/checkpoints/step_2"
    )
