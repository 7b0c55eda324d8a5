"""F4: a run of which a rank is killed at every write of a checkpoint, one after the other, ends as one that was not."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import RankError, RankPool
from small_run import run_steps

from shardwise.fault_plan import VARIABLE, plan
from shardwise.recipes.checkpointing.checkpoints import step_folders

STEPS, EVERY = 120, 2
WITHOUT_END = 10**6


@pytest.fixture(scope="module")
def ranks():
    """Ranks that may be killed: a call after that has fresh ones."""
    pool = RankPool()
    yield pool
    pool.close()


def train(run, model, faults, total_steps, options):
    """From the newest checkpoint. Returns the steps that were done, on rank 0, and how often this rank entered each
    phase.

    Args:
        faults: by rank.
    """
    os.environ[VARIABLE] = faults.get(dist.get_rank(), "")
    plan.cache_clear()
    steps, error, _ = run_steps(run, model, total_steps=total_steps, **options) or (None, None, "")
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


def kill_points(entered, *, every):
    """(rank, phase, nth): one in `every` writes of all ranks, then what rank 0 does when all is written.

    Args:
        entered: by rank how often it enters each phase in a save.
    """
    writes = [(rank, "write", nth) for rank, phases in enumerate(entered) for nth in range(1, phases["write"] + 1)]
    assert len(writes) >= 50
    assert all(phases["write"] >= 10 for phases in entered)
    return [*writes[::every], (0, "commit", 1), (0, "commit", 2), (0, "prune", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "async_save", "every"),
    [
        pytest.param(1, True, 1, id="one rank, in the background", marks=pytest.mark.full),
        pytest.param(1, False, 1, id="one rank, at once", marks=pytest.mark.full),
        pytest.param(2, True, 24, id="two ranks, in the background, at some"),
        pytest.param(2, True, 1, id="two ranks, in the background", marks=pytest.mark.full),
        pytest.param(2, False, 1, id="two ranks, at once", marks=pytest.mark.full),
    ],
)
def test_f04_a_run_killed_at_each_write_of_a_save_ends_as_one_that_was_not(
    ranks, model_folder, tmp_path, world_size, async_save, every
):
    """Every group of ranks resumes from the newest whole checkpoint and does two steps; then one of them dies in its
    save, each at every one of its own writes: so each group proves that the one before has left nothing half."""
    options = {"save_every_steps": EVERY, "keep_last": 1, "async_save": async_save}

    def steps_of(run, faults, total_steps):
        return ranks.run(train, world_size, str(run), str(model_folder), faults, total_steps, options)

    counting = dict.fromkeys(range(world_size), f"phase=write nth={WITHOUT_END}")
    counted = [entered for _, entered in steps_of(tmp_path / "count", counting, EVERY)]
    assert counted[0]["commit"] == 2
    run, done = tmp_path / "run", 0
    for rank, phase, nth in kill_points(counted, every=every):
        with pytest.raises(RankError, match=f"rank {rank} died with exit code -9"):
            steps_of(run, {rank: f"phase={phase} nth={nth}"}, STEPS)
        newest = max(step_folders(run), default=0)
        is_published = (phase, nth) in (("commit", 2), ("prune", 1))
        assert newest == done + EVERY * is_published, (rank, phase, nth)
        done = newest
    last = done + EVERY
    assert steps_of(run, {}, last)[0][0] == [done + 1, last]
    steps_of(tmp_path / "whole", {}, last)
    name = f"step_{last}"
    assert files_of(run / "checkpoints" / name) == files_of(tmp_path / "whole" / "checkpoints" / name)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {name, "latest"}, "no leftovers"


@pytest.mark.parametrize(
    ("action", "every"),
    [("enospc", 3), *(pytest.param(action, 1, marks=pytest.mark.full) for action in ("enospc", "eio"))],
    ids=["enospc at every third write", "enospc", "eio"],
)
def test_f20_f21_an_error_of_the_disk_at_each_write_costs_that_save_alone(ranks, model_folder, tmp_path, action, every):
    """Of a run that saves after every step, the save of every second step meets the error at the next of its writes.
    Those between are whole, nothing is left of the others, and the run ends as one whose disk was well."""
    options = {"save_every_steps": 1, "on_save_error": "continue", "async_save": False}
    counting = {0: f"phase=write nth={WITHOUT_END}"}
    ((_, entered),) = ranks.run(train, 1, str(tmp_path / "count"), str(model_folder), counting, 1, options)
    assert entered["write"] >= 50
    writes = range(1, entered["write"] + 1, every)
    faults = ";".join(f"step={2 * n} phase=write nth={nth} action={action}" for n, nth in enumerate(writes, 1))
    last, run, whole = 2 * len(writes) + 1, tmp_path / "run", tmp_path / "whole"
    ranks.run(train, 1, str(run), str(model_folder), {0: faults}, last, options)
    ranks.run(train, 1, str(whole), str(model_folder), {}, last, options | {"save_every_steps": last})
    found = {path.name for path in (run / "checkpoints").iterdir()}
    assert found == {"latest", *(f"step_{step}" for step in range(1, last + 1, 2))}
    for name in found - {"latest"}:
        assert files_of(run / "checkpoints" / name).keys() == files_of(whole / "checkpoints" / f"step_{last}").keys()
    assert files_of(run / "checkpoints" / f"step_{last}") == files_of(whole / "checkpoints" / f"step_{last}")
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
