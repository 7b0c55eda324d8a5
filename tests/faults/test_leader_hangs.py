"""Rank 0 stands still where nobody else waits for it with a deadline."""

import re
import time

import pytest

from shardwise.fault_plan import VARIABLE as FAULT_PLAN

SECONDS = 8


def sft(assets):
    return [
        *("sft", f"model.path={assets.model}", f"data.train_files={assets.sft}", "data.max_sequence_tokens=64"),
        *("data.max_train_rows=16", "trainer.batch_size=4", "trainer.total_steps=2"),
    ]


def rl(assets):
    return [
        *("rl", f"model.path={assets.model}", f"data.train_files={assets.parquet}", "data.max_prompt_tokens=40"),
        *("rollout.num_prompts=2", "rollout.group_size=2", "rollout.max_response_tokens=8"),
        *(f"reward.functions={assets.reward}", "trainer.total_steps=2"),
    ]


def ahead(assets):
    """A thread samples while training waits for it."""
    return [*rl(assets), "rollout.placement=split", "rollout.max_staleness=1"]


CASES = {
    "alone, in forward": (sft, 1, "phase=forward action=hang", "train, `train policy`", ""),
    "two ranks, in reward": (rl, 2, "rank=0 phase=reward action=hang", "rollout", ""),
    "sampling ahead, in reward": (ahead, 2, "rank=0 phase=reward action=hang", "rollout", ""),
    "two ranks, stopped": (rl, 2, "rank=0 phase=reward action=stop", "rollout", " and is stopped (SIGSTOP)"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_f03_rank_0_that_does_not_go_on_ends_the_job_with_its_stacks(assets, start, tmp_path, name):
    recipe, nproc, fault, place, state = CASES[name]
    command, *options = recipe(assets)
    run = start(
        *(command, "--nproc", str(nproc), *options),
        "trainer.tensorboard=false",
        f"trainer.stall_timeout_seconds={SECONDS}",
        f"trainer.faults=[{fault}]",
        f"trainer.output_dir={tmp_path / 'run'}",
    )
    began = time.monotonic()
    assert run.end() == 1
    assert time.monotonic() - began < 90
    assert re.match(
        rf"error: rank 0 hangs in step 1, {re.escape(place + state)}: rank 0 has not gone on for \d+ s "
        rf"\(trainer\.stall_timeout_seconds={SECONDS}\); if it is only slow, raise that; "
        rf".*stacks.*: {run.run}/faults/1\n$",
        run.err,
    ), run.err
    if not state:
        assert "in fault_point" in (run.run / "faults" / "1" / "rank_0.txt").read_text()
    if nproc == 2:
        assert "in serve" in (run.run / "faults" / "1" / "rank_1.txt").read_text()


@pytest.mark.full
def test_f03_an_evaluation_that_does_not_go_on_ends_likewise(assets, start, tmp_path):
    run = start(
        *("eval", "--nproc", "2", f"model.path={assets.model}", f"data.validation_files={assets.parquet}"),
        *("data.max_prompt_tokens=40", "rollout.max_response_tokens=8", f"reward.functions={assets.reward}"),
        f"eval.stall_timeout_seconds={SECONDS}",
        f"eval.output_dir={tmp_path / 'run'}",
        faults="rank=0 phase=rollout action=hang",
    )
    assert run.end() == 1
    assert re.match(
        rf"error: rank 0 hangs in .*`generate`.*: rank 0 has not gone on for \d+ s "
        rf"\(eval\.stall_timeout_seconds={SECONDS}\); if it is only slow, raise that; "
        rf".*stacks.*: {run.run}/faults/1\n$",
        run.err,
    ), run.err
    assert "in fault_point" in (run.run / "faults" / "1" / "rank_0.txt").read_text()


@pytest.mark.full
@pytest.mark.parametrize("nproc", [1, 2])
def test_f03_an_export_that_does_not_go_on_ends_and_leaves_no_folder(assets, shell, tmp_path, monkeypatch, nproc):
    monkeypatch.setenv(FAULT_PLAN, "rank=0 phase=write action=hang")
    options = ["--nproc", str(nproc), "--stall-timeout-seconds", str(SECONDS)]
    done = shell("shardwise", "export", str(assets.model), str(tmp_path / "out"), *options)
    assert done.code == 1
    assert re.match(
        rf"error: rank 0 hangs in .*: rank 0 has not gone on for \d+ s \(--stall-timeout-seconds={SECONDS}\); ",
        done.err,
    ), done.err
    assert not (tmp_path / "out").exists()
