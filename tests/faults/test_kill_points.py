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
