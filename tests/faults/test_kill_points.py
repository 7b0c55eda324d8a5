"""F4: a run that is killed at every write of a checkpoint, process after process, ends as one that was not."""

import os
from pathlib import Path

import pytest
from ranks import RankError, RankPool
from small_run import run_steps

from shardwise.fault_plan import VARIABLE, plan
from shardwise.recipes.checkpoints import step_folders

STEPS, EVERY = 120, 2
WITHOUT_END = 10**6


@pytest.fixture(scope="module")
def process():
    """One rank that may be killed: a call after that has a fresh one."""
    pool = RankPool()
    yield pool
    pool.close()


def train(run, model, faults, total_steps, options):
    """On one rank, from the newest checkpoint. Returns the steps that were done and how often it entered each phase."""
    os.environ[VARIABLE] = faults
    plan.cache_clear()
    steps, error, _ = run_steps(run, model, total_steps=total_steps, **options)
    assert error is None
    return steps, dict(plan().entered)


def files_of(checkpoint: Path) -> dict[str, bytes]:
    """Without run.json and the manifest, which name folders and the time."""
    left_out = {"run.json", "manifest.json"}
    return {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name not in left_out
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "async_save",
    [pytest.param(True, id="in the background"), pytest.param(False, id="at once", marks=pytest.mark.full)],
)
def test_f04_a_run_killed_at_each_write_of_a_save_ends_as_one_that_was_not(process, model_folder, tmp_path, async_save):
    """Every process goes on from the newest whole checkpoint, does two steps and dies in its save, one write later than
    the one before it: so each of them proves that the one before has left nothing half."""
    options = {"save_every_steps": EVERY, "keep_last": 1, "async_save": async_save}
    counting = f"phase=write nth={WITHOUT_END}"
    ((_, entered),) = process.run(train, 1, str(tmp_path / "count"), str(model_folder), counting, EVERY, options)
    assert entered["commit"] == 2
    points = [("write", nth) for nth in range(1, entered["write"] + 1)]
    points += [("commit", 1), ("commit", 2), ("prune", 1)]
    assert len(points) >= 50
    run, done = tmp_path / "run", 0
    for phase, nth in points:
        with pytest.raises(RankError, match="rank 0 died with exit code -9"):
            process.run(train, 1, str(run), str(model_folder), f"phase={phase} nth={nth}", STEPS, options)
        newest = max(step_folders(run), default=0)
        is_published = (phase, nth) in (("commit", 2), ("prune", 1))
        assert newest == done + EVERY * is_published, (phase, nth)
        done = newest
    last = done + EVERY
    ((steps, _),) = process.run(train, 1, str(run), str(model_folder), "", last, options)
    assert steps == [done + 1, last]
    process.run(train, 1, str(tmp_path / "whole"), str(model_folder), "", last, options)
    name = f"step_{last}"
    assert files_of(run / "checkpoints" / name) == files_of(tmp_path / "whole" / "checkpoints" / name)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {name, "latest"}, "no leftovers"


@pytest.mark.parametrize("action", ["enospc", pytest.param("eio", marks=pytest.mark.full)])
def test_f20_f21_an_error_of_the_disk_at_each_write_costs_that_save_alone(process, model_folder, tmp_path, action):
    """Of a run that saves after every step, the save of step 2 n meets the error at its n-th write. Those between are
    whole, nothing is left of the others, and the run ends as one whose disk was well."""
    options = {"save_every_steps": 1, "on_save_error": "continue", "async_save": False}
    counting = f"phase=write nth={WITHOUT_END}"
    ((_, entered),) = process.run(train, 1, str(tmp_path / "count"), str(model_folder), counting, 1, options)
    num_writes = entered["write"]
    assert num_writes >= 50
    faults = ";".join(f"step={2 * n} phase=write nth={n} action={action}" for n in range(1, num_writes + 1))
    last, run, whole = 2 * num_writes + 1, tmp_path / "run", tmp_path / "whole"
    process.run(train, 1, str(run), str(model_folder), faults, last, options)
    process.run(train, 1, str(whole), str(model_folder), "", last, options | {"save_every_steps": last})
    found = {path.name for path in (run / "checkpoints").iterdir()}
    assert found == {"latest", *(f"step_{step}" for step in range(1, last + 1, 2))}
    for name in found - {"latest"}:
        assert files_of(run / "checkpoints" / name).keys() == files_of(whole / "checkpoints" / f"step_{last}").keys()
    assert files_of(run / "checkpoints" / f"step_{last}") == files_of(whole / "checkpoints" / f"step_{last}")
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
