"""Ranks under torchrun, where no launcher of ours watches."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from runs import MARK, ROOT

from shardwise.controller.signals import COPIES_SECONDS

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def options(assets, run):
    return [
        f"model.path={assets.model}",
        f"data.train_files={assets.sft}",
        f"trainer.output_dir={run}",
        "data.max_sequence_tokens=64",
        "trainer.total_steps=4",
        "trainer.batch_size=4",
    ]


@pytest.mark.full  # in make test too: tests/faults/test_death.py, tests/controller
@pytest.mark.parametrize(
    ("action", "state"),
    [pytest.param("hang", "", id="sleeps"), pytest.param("stop", r" and is stopped \(SIGSTOP\)", id="is stopped")],
)
def test_f03_a_rank_that_hangs_is_named_with_the_stacks_of_all_and_ended(assets, shell, tmp_path, action, state):
    started = time.monotonic()
    done = shell(
        *(*TORCHRUN, "-m", "shardwise", "sft"),
        *options(assets, tmp_path / "run"),
        "engine.collective_timeout_seconds=15",
        f"trainer.faults=[rank=1 step=2 phase=allreduce action={action}]",
    )
    assert done.code == 1
    assert time.monotonic() - started < 75, "torchrun gives ranks that do not answer 30 s more"
    reports = tmp_path / "run" / "faults" / "1"
    (told,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(
        rf"error: rank 1 hangs in step 2, `train policy`{state}: rank 0 waited in vain \(.*[Tt]imed out.*\); stacks of "
        rf"the ranks on {socket.gethostname()}: {reports}",
        told,
    )
    first, second = ((reports / f"rank_{rank}.txt").read_text() for rank in (0, 1))
    assert "optim_step" in first
    assert "Timed out" in first
    assert ("is stopped (SIGSTOP)" in second) if action == "stop" else ("in fault_point" in second)


@pytest.mark.full
def test_a_restart_by_torchrun_does_not_meet_what_the_attempt_before_left(assets, shell, tmp_path):
    run = tmp_path / "run"
    done = shell(
        *(*TORCHRUN, "--max-restarts", "1", "-m", "shardwise", "sft"),
        *options(assets, run),
        "trainer.save_every_steps=1",
        "trainer.async_save=false",
        "trainer.faults=[rank=0 step=3 phase=backward action=kill]",  # once, though the command is the same
        timeout=180,
    )
    assert done.code == 0, done.err
    assert f"resumes from {run}/checkpoints/step_2" in done.out
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


@contextmanager
def two_agents(assets, folder, *overrides, meet, max_restarts):
    """As on two hosts, each with one rank; what is said comes into `folder`/out. `meet`: torchrun's options for the
    port that each agent meets the other at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
    command = [
        *("--max-restarts", str(max_restarts), "-m", "shardwise", "sft", *options(assets, folder / "run")),
        *("trainer.save_every_steps=1", "trainer.async_save=false", "engine.collective_timeout_seconds=30"),
        *overrides,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: str(folder)}
    with (folder / "out").open("w") as out:
        agents = [
            subprocess.Popen([*torchrun, *meet(number, port), *command], env=environment, stdout=out, stderr=out)
            for number in range(2)
        ]
        try:
            yield agents
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()


def run_on_two_agents(assets, folder, *overrides, meet, max_restarts):
    """As `two_agents`. Returns the exit codes and what was said."""
    with two_agents(assets, folder, *overrides, meet=meet, max_restarts=max_restarts) as agents:
        codes = [agent.wait(timeout=180) for agent in agents]
    return codes, (folder / "out").read_text()


def meet_at_the_first(number, port):
    return "--node-rank", f"{number}", "--master-addr", "127.0.0.1", "--master-port", f"{port}"


@pytest.mark.full  # in make test too: tests/controller/test_attempts.py, tests/controller/test_process_group.py
def test_ranks_of_two_agents_go_on_together_after_one_died(assets, tmp_path):
    """Only the agent of the rank that died counts a restart."""
    codes, told = run_on_two_agents(
        assets,
        tmp_path,
        # Rank 0 must not fail for the one that died before its agent hears of the other one's restart.
        "trainer.faults=[rank=1 step=3 phase=forward action=kill, rank=0 step=3 phase=forward action=hang]",
        meet=lambda _, port: ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        max_restarts=1,
    )
    assert codes == [0, 0], told
    assert "could not join" not in told, "a restart was lost to ranks that did not find each other"
    run = tmp_path / "run"
    assert f"resumes from {run}/checkpoints/step_2" in told
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.full  # in make test too: tests/controller/test_roll_call.py
@pytest.mark.parametrize(
    ("action", "reason"),
    [("kill", "is gone and left no word: its process was killed or stopped, or "), ("raise", "failed: ")],
    ids=["is killed", "fails"],
)
def test_f01_rank_0_names_the_rank_that_ended_on_another_host(assets, tmp_path, action, reason):
    fault = f"trainer.faults=[rank=1 step=3 phase=forward action={action}]"
    codes, told = run_on_two_agents(assets, tmp_path, fault, meet=meet_at_the_first, max_restarts=0)
    assert codes == [1, 1]
    errors = [line for line in told.splitlines() if line.startswith("error: rank 1 on ")]
    assert len(errors) == 1, told
    assert errors[0].startswith(f"error: rank 1 on {socket.gethostname()} {reason}")


@pytest.mark.full  # in make test too: tests/controller/test_neighbours.py
def test_f01_a_host_whose_processes_are_killed_is_named_while_rank_0_waits_for_something_else(assets, tmp_path):
    """Its agent dies with them, so that nobody tells rank 0's."""
    fault = "trainer.faults=[rank=0 step=3 phase=forward action=hang]"
    with two_agents(assets, tmp_path, fault, meet=meet_at_the_first, max_restarts=0) as agents:
        wait_for_steps(tmp_path, 2, agents[0])
        time.sleep(1.0)  # until rank 0 hangs
        agents[1].kill()
        began = time.monotonic()
        assert agents[0].wait(timeout=60) == 1
        assert time.monotonic() - began < 20
    told = (tmp_path / "out").read_text()
    assert f"error: rank 1 on {socket.gethostname()} is gone and left no word" in told


@contextmanager
def going_on(assets, folder, *overrides):
    """torchrun, when its ranks have trained two steps. They are marked with `folder`, whose `out` has what they say."""
    run = folder / "run"
    command = [sys.executable, "-m", *TORCHRUN, "-m", "shardwise", "sft", *options(assets, run)]
    endless = ["trainer.total_steps=100000", "trainer.save_every_steps=0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: str(folder)}
    with (folder / "out").open("w") as out:
        process = subprocess.Popen([*command, *endless, *overrides], env=environment, stdout=out, stderr=out)
    try:
        wait_for_steps(folder, 2, process)
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_steps(folder, num_steps, process):
    """Until the run in `folder` has trained so many."""
    metrics, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text().count("\n") >= num_steps):
        assert process.poll() is None, (folder / "out").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def seconds_until_gone(marked, mark):
    """At most 60."""
    began = time.monotonic()
    while marked(mark) and time.monotonic() < began + 60:
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.mark.full
@pytest.mark.parametrize("victim", ["torchrun", "1"])
def test_f11_a_signal_to_torchrun_or_to_one_rank_saves_and_stops(assets, marked, tmp_path, victim):
    """A host that is taken away is told so alone; rank 0, which decides, may be on another."""
    run, mark = tmp_path / "run", str(tmp_path)
    with going_on(assets, tmp_path) as process:
        pids = {"torchrun": process.pid, **{rank_of(pid): pid for pid in marked(mark)}}
        os.kill(pids[victim], signal.SIGTERM)
        process.wait(timeout=60)
    told = (tmp_path / "out").read_text()
    last = len((run / "metrics.jsonl").read_text().splitlines())
    assert "SIGTERM: saves and stops after this step" in told
    assert f"stopped by SIGTERM; resumable: the same command continues after step {last}" in told
    assert (run / "checkpoints" / f"step_{last}" / "manifest.json").is_file()


HANGS = "trainer.faults=[rank=1 step=3 phase=forward action=hang]"


@pytest.mark.full  # in make test too: tests/recipes/test_stopping.py, tests/controller
def test_f10_a_second_signal_to_torchrun_ends_ranks_at_once_also_one_that_hangs(assets, marked, tmp_path):
    """torchrun alone would wait 30 s for the rank that hangs; until then the first signal waits for its step."""
    with going_on(assets, tmp_path, HANGS) as process:
        time.sleep(0.5)  # until rank 1 hangs
        process.send_signal(signal.SIGINT)
        time.sleep(COPIES_SECONDS + 1)
        assert {"0", "1"} <= {rank_of(pid) for pid in marked(str(tmp_path))}
        process.send_signal(signal.SIGINT)
        assert seconds_until_gone(marked, str(tmp_path)) < 15
    told = [line for line in (tmp_path / "out").read_text().splitlines() if line.startswith(("SIG", "error"))]
    assert told == [
        "SIGINT: saves and stops after this step",
        "SIGINT: ended at once without saving; there is no checkpoint yet, so the same command starts as before",
    ]


@pytest.mark.full  # in make test too: tests/controller/test_launch.py
def test_f05_a_killed_torchrun_takes_all_with_it(assets, marked, tmp_path):
    with going_on(assets, tmp_path) as process:
        process.kill()
        process.wait()
        assert seconds_until_gone(marked, str(tmp_path)) < 5


def rank_of(pid):
    """As torchrun has numbered it; None of other processes."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((one.removeprefix(b"RANK=").decode() for one in variables if one.startswith(b"RANK=")), None)


@pytest.mark.full
def test_a_mistake_found_in_the_recipe_is_one_line_and_the_other_rank_leaves_quietly(assets, shell, tmp_path):
    arguments = [*options(assets, tmp_path / "run"), "data.max_sequence_tokens=2", "data.on_overlong=drop"]
    done = shell(*TORCHRUN, "-m", "shardwise", "sft", *arguments)
    assert done.code == 1
    told = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, done.err
    assert told[0].startswith("error: rank 0: 0 of "), told
    assert "entry.py" not in done.err, "a traceback of ours"
