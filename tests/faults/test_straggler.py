"""F15: a rank that is slower than the others is named, and nothing times out."""

import json

import pytest
import torch.distributed as dist
from small_run import run_steps

from shardwise.fault_plan import SLOW_SECONDS, begin_plan, plan


def slowed(run, model, rank, fault):
    begin_plan([fault] if dist.get_rank() == rank else [])
    try:
        return run_steps(run, model)
    finally:
        plan.cache_clear()


@pytest.mark.parametrize(("phase", "rank"), [("forward", 1), ("backward", 0)])
def test_f15_a_slow_rank_is_named_although_the_other_takes_as_long_by_the_clock(
    run_ranks, model_folder, tmp_path, phase, rank
):
    """It is as slow in each of the steps 3 to 6; the other waits for it in the next collective."""
    run = tmp_path / "run"
    fault = f"phase={phase} nth=3 action=slow"
    (steps, error, _), _ = run_ranks(slowed, 2, str(run), str(model_folder), rank, fault)
    assert (steps, error) == ([1, 2, 3, 4, 5, 6], None)
    rows = [json.loads(line) for line in (run / "performance.jsonl").read_text().splitlines()]
    assert [row[f"train/{phase}_slowest_rank"] for row in rows[2:]] == [rank] * 4
    assert all(row[f"train/{phase}_imbalance"] > 2 for row in rows[2:]), rows
    assert all(row["seconds/step"] > SLOW_SECONDS for row in rows[2:])
    assert not any("busy" in name for line in (run / "metrics.jsonl").open() for name in json.loads(line))
