import pytest

from shardwise.recipes.stragglers import slow_rank, straggler_metrics, stragglers, without_busy
from shardwise.types import MetricValue, merge_metrics


def step_of(seconds):
    """The metrics of two optimizer steps, each rank's as it returns them."""
    parts = [{f"train/busy/forward/rank_{rank}": MetricValue.sum(value / 2)} for rank, value in enumerate(seconds)]
    return merge_metrics([*parts, *parts])


@pytest.mark.parametrize(
    ("seconds", "slowest", "imbalance"),
    [([1.0, 3.0], 1, 3.0), ([3.0, 1.0, 2.0, 0.0], 0, 3.0), ([2.0, 2.0], 0, 1.0), ([0.0, 0.0], 0, 1.0)],
)
def test_the_slowest_rank_is_compared_with_the_mean_of_the_others(seconds, slowest, imbalance):
    loss = {"train/loss": MetricValue.sum(0.5)}
    rest, busy = without_busy(step_of(seconds) | loss)
    assert rest == loss
    assert busy == {"train/forward": dict(enumerate(seconds))}
    found = stragglers(busy)
    metrics = {"train/forward_slowest_rank": slowest, "train/forward_imbalance": imbalance}
    assert straggler_metrics(found) == metrics
    told = {f"rank {slowest} slower by a factor of": imbalance}
    assert slow_rank(found, step_seconds=20) == (told if imbalance >= 2 else {})
    assert slow_rank(found, step_seconds=21) == {}


def test_a_rank_alone_is_not_the_slowest():
    assert stragglers(without_busy(step_of([1.0]))[1]) == []
    assert straggler_metrics([]) == slow_rank([], step_seconds=1) == {}


def test_the_rank_that_costs_most_is_named():
    busy = {"train/forward": {0: 0.01, 1: 0.1}, "critic/backward": {0: 4.0, 1: 1.0}}
    assert slow_rank(stragglers(busy), step_seconds=9) == {"rank 0 slower by a factor of": 4.0}
