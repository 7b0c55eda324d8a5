"""Ranks under torchrun, where no launcher of ours watches."""

import json
import re
import socket
import time

import pytest

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


@pytest.mark.parametrize(
    ("action", "state"),
    [
        pytest.param("hang", "", id="sleeps"),
        pytest.param("stop", r" and is stopped \(SIGSTOP\)", id="is stopped", marks=pytest.mark.full),
    ],
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


def test_a_mistake_found_in_the_recipe_is_one_line_and_the_other_rank_leaves_quietly(assets, shell, tmp_path):
    arguments = [*options(assets, tmp_path / "run"), "data.max_sequence_tokens=2048"]
    done = shell(*TORCHRUN, "-m", "shardwise", "sft", *arguments)
    assert done.code == 1
    told = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, done.err
    assert told[0].startswith("error: rank 0: data.max_sequence_tokens = 2048 tokens, more than the 96 ")
    assert "entry.py" not in done.err, "a traceback of ours"
