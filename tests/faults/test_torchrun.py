"""Ranks under torchrun, where no launcher of ours watches."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import MARK, ROOT

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
        "trainer.faults=[rank=0 step=2 phase=commit nth=2 action=kill]",  # torchrun plans it anew: after step 2
        timeout=180,
    )
    assert done.code == 0, done.err
    assert f"goes on from {run}/checkpoints/step_2" in done.out
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.full
@pytest.mark.parametrize("victim", ["torchrun", "1"])
def test_f11_a_signal_to_torchrun_or_to_one_rank_saves_and_stops(assets, marked, tmp_path, victim):
    """A host that is taken away is told so alone; rank 0, which decides, may be on another."""
    run, mark = tmp_path / "run", str(tmp_path)
    command = [sys.executable, "-m", *TORCHRUN, "-m", "shardwise", "sft", *options(assets, run)]
    overrides = ["trainer.total_steps=100000", "trainer.save_every_steps=0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: mark}
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen([*command, *overrides], env=environment, stdout=out, stderr=out)
    try:
        metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
            assert process.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pids = {"torchrun": process.pid, **{rank_of(pid): pid for pid in marked(mark)}}
        os.kill(pids[victim], signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    told = (tmp_path / "out").read_text()
    last = len(metrics.read_text().splitlines())
    assert "SIGTERM: saves and stops after this step" in told
    assert f"stopped by SIGTERM; resumable: the same command goes on after step {last}" in told
    assert (run / "checkpoints" / f"step_{last}" / "manifest.json").is_file()


def rank_of(pid):
    """As torchrun has numbered it; None of other processes."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((one.removeprefix(b"RANK=").decode() for one in variables if one.startswith(b"RANK=")), None)


@pytest.mark.full
def test_a_mistake_found_in_the_recipe_is_one_line_and_the_other_rank_leaves_quietly(assets, shell, tmp_path):
    arguments = [*options(assets, tmp_path / "run"), "data.max_sequence_tokens=2048"]
    done = shell(*TORCHRUN, "-m", "shardwise", "sft", *arguments)
    assert done.code == 1
    told = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, done.err
    assert told[0].startswith("error: rank 0: data.max_sequence_tokens = 2048 tokens, more than the 96 ")
    assert "entry.py" not in done.err, "a traceback of ours"
