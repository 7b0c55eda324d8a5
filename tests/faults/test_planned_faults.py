"""Faults of the plan in whole runs: by step, from the config, and those of a file system."""

import json
import re
import time
from functools import partial

import pytest
import torch.distributed as dist
from small_run import run_steps

from shardwise.fault_plan import begin_plan, plan

KILL = "rank=1 step=3 phase=backward action=kill"


def four_steps(assets):
    """Overrides for a run that saves in its second step and its fourth."""
    return [
        f"model.path={assets.model}",
        f"data.train_files={assets.sft}",
        "data.max_train_rows=16",
        "data.max_sequence_tokens=64",
        "trainer.batch_size=4",
        "trainer.total_steps=4",
        "trainer.save_every_steps=2",
    ]


@pytest.mark.full
def test_a_rank_is_killed_in_the_step_that_the_config_names_and_not_again_after_the_restart(assets, start, tmp_path):
    run = start(
        *("sft", "--nproc", "2", "--max-restarts", "1", *four_steps(assets)),
        "trainer.async_save=false",
        "trainer.tensorboard=false",
        f"trainer.faults=[{KILL}]",
        f"trainer.output_dir={tmp_path / 'run'}",
    )
    assert run.end() == 0, run.err
    cause, restart = run.err.splitlines()
    assert cause.startswith("error: rank 1 was ended by SIGKILL in step 3")
    assert restart == f"restart 1 of 1: resumes from {run.run}/checkpoints/step_2"
    assert run.steps == [1, 2, 3, 4]


@pytest.mark.full
def test_a_save_that_hangs_on_the_rank_that_commands_ends_the_job_with_the_stacks_of_all(assets, start, tmp_path):
    """Nobody else waits for that rank: its own deadline ends it."""
    run = start(
        *("sft", "--nproc", "2", *four_steps(assets)),
        "trainer.save_timeout_seconds=3",
        "trainer.faults=[rank=0 phase=write action=hang]",
        f"trainer.output_dir={tmp_path / 'run'}",
    )
    assert run.end() == 1
    assert re.match(r"error: rank 0 failed in step \d.*: a save in the background was not done within 3 s ", run.err)
    assert run.err.endswith(f"; stacks of every rank: {run.run}/faults/1\n")
    assert "in fault_point" in (run.run / "faults" / "1" / "rank_0.txt").read_text()
    assert not (run.run / "checkpoints" / "step_2").exists()


@pytest.mark.full
def test_f03_a_rank_that_is_stopped_during_a_save_ends_the_job_by_the_deadline_of_collectives(assets, start, tmp_path):
    """The save in the background waits for the same rank, by a deadline of its own, which is longer than the test."""
    run = start(
        *("sft", "--nproc", "2", *four_steps(assets)),
        *("engine.collective_timeout_seconds=8", "trainer.save_timeout_seconds=3600"),
        "trainer.faults=[rank=1 phase=write action=stop]",
        f"trainer.output_dir={tmp_path / 'run'}",
    )
    run.wait_until(lambda: 2 in run.steps)
    began = time.monotonic()
    assert run.end() == 1
    assert time.monotonic() - began < 60
    assert re.match(r"error: rank 1 hangs in .* and is stopped \(SIGSTOP\)", run.err), run.err
    assert not (run.run / "checkpoints" / "step_2").exists()


@pytest.mark.full
def test_f21_a_save_may_take_longer_than_a_collective(assets, start, tmp_path):
    """Each of rank 1's writes takes 0.2 s, all of them longer than ranks wait for each other in training."""
    run = start(
        *("sft", "--nproc", "2", *four_steps(assets)),
        "engine.collective_timeout_seconds=10",
        "trainer.faults=[rank=1 phase=write action=slow]",
        "trainer.tensorboard=false",
        f"trainer.output_dir={tmp_path / 'run'}",
    )
    assert run.end() == 0, run.err
    assert saved(run.run) == ["latest", "step_2", "step_4"]
    published = [(run.run / "checkpoints" / name / "manifest.json").stat().st_mtime for name in ("step_2", "step_4")]
    assert published[1] - published[0] > 10


def faulty_disk(run, model, rank, fault, options):
    begin_plan([fault] if dist.get_rank() == rank else [])
    try:
        return run_steps(run, model, **options)
    finally:
        plan.cache_clear()


def saved(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("rank", [0, 1])
def test_f21_an_error_of_the_disk_on_one_rank_fails_its_save_alone(run_ranks, model_folder, tmp_path, rank):
    """In step 4; the checkpoints of steps 2 and 6 are whole, and nothing of the other is left."""
    run = tmp_path / "run"
    options = {"on_save_error": "continue"}
    fault = "step=4 phase=write action=eio"
    (steps, error, said), _ = run_ranks(faulty_disk, 2, str(run), str(model_folder), rank, fault, options)
    assert (steps, error) == ([1, 2, 3, 4, 5, 6], None)
    assert "warning: the checkpoint of step 4 was not saved: " in said
    assert "Input/output error" in said
    assert saved(run) == ["latest", "step_2", "step_6"]


@pytest.mark.full
def test_f21_a_slow_disk_of_one_rank_delays_saves_and_not_steps(run_ranks, model_folder, tmp_path):
    """Each write takes 0.2 s longer."""
    run = tmp_path / "run"
    options = {"async_save": True, "total_steps": 4, "save_every_steps": 2}
    fast = run_ranks(partial(run_steps, **options), 2, str(tmp_path / "fast"), str(model_folder))[0]
    begun = time.perf_counter()
    slow = run_ranks(faulty_disk, 2, str(run), str(model_folder), 1, "phase=write action=slow", options)[0]
    assert time.perf_counter() - begun > 5
    assert slow == fast
    assert saved(run) == ["latest", "step_2", "step_4"]
    for step in (2, 4):
        weights = [folder / f"checkpoints/step_{step}/hf/model.safetensors" for folder in (run, tmp_path / "fast")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    third = [json.loads(line) for line in (run / "performance.jsonl").read_text().splitlines()][2]
    assert third["step"] == 3
    assert third["seconds/step"] < 2
