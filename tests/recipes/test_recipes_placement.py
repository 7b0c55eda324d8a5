import threading

import pytest

from shardwise.config import RLConfig, RolloutConfig
from shardwise.recipes.placement import Ranks


class Group:
    """Notes its calls; `pull_weights` and `push_weights` wait for each other, as collectives do."""

    def __init__(self, name, log, meeting, size=4):
        self.name, self.log, self.meeting, self.size = name, log, meeting, size

    def part(self, first, last, *, timeout_seconds, timeout_key):
        return Group(f"{first}-{last} in {timeout_seconds} s of {timeout_key}", self.log, self.meeting, last - first)

    def call(self, method, *args):
        if method in ("push_weights", "pull_weights"):
            self.meeting.wait(timeout=5)
        self.log.append((self.name, method, args))
        return [f"receipt of {method}"] * self.size


def ranks(**keys):
    log = []
    config = RLConfig.model_construct(rollout=RolloutConfig.parse(keys, origin="test"))
    return Ranks.of(Group("all", log, threading.Barrier(2)), config), log


def test_colocated_ranks_do_both():
    found, log = ranks()
    assert found.rollouts is found.trainers
    assert not found.are_split
    assert found.sync_weights(7) == ["receipt of sync_weights"] * 4
    assert log == [("all", "sync_weights", (7,))]


def test_ranks_that_are_one_engine_are_sent_parts_of_the_weights_but_whole_adapters():
    engine = {"type": "vllm", "args": {"tensor_parallel_size": 2}}
    assert ranks(engine=engine)[0].num_weight_parts == 2
    assert ranks(engine=engine, sync_adapter_only=True)[0].num_weight_parts == 1
    assert ranks()[0].num_weight_parts == 1


@pytest.mark.parametrize("delta", [False, True])
def test_split_ranks_are_the_last_ones_and_weights_are_sent_and_received_at_the_same_time(delta):
    found, log = ranks(placement={"num_ranks": 3, "timeout_seconds": 5, "delta": delta})
    assert (found.trainers.size, found.rollouts.size) == (1, 3)
    assert found.sync_weights(7) == ["receipt of pull_weights"] * 3
    assert sorted(log) == [
        ("0-1 in 600 s of engine.collective_timeout_seconds", "push_weights", (7, delta)),
        ("1-4 in 5 s of rollout.placement.timeout_seconds", "pull_weights", (7, delta)),
    ]


def test_what_carries_weights_is_measured_from_both_ends():
    found, log = ranks(placement={"num_ranks": 3})
    found.trainers.call = lambda method: [0.5]
    assert found.seconds_per_byte() == 0.5
    assert [(method, args) for _, method, args in log] == [("measure_pull", ())]
    colocated, _ = ranks()
    colocated.trainers.call = lambda method: [0.1, 0.3] if method == "measure_sync" else None
    assert colocated.seconds_per_byte() == 0.3


def test_what_fails_in_receiving_is_raised_where_weights_are_sent():
    found, _ = ranks(placement="split")
    found.rollouts.meeting = threading.Barrier(1)
    found.trainers.meeting = threading.Barrier(1)

    def fail(method, *args):
        raise ValueError("the moon is full")

    found.rollouts.call = fail
    with pytest.raises(ValueError, match="the moon is full"):
        found.sync_weights(1)


@pytest.mark.parametrize(("placement", "rank_counts"), [("colocated", 4), ({"num_ranks": 3}, 3)])
def test_restarts_of_engines_are_added_up_where_they_have_processes(placement, rank_counts):
    without, log = ranks(placement=placement)
    assert without.take_restarts() == {}
    assert log == []
    found, _ = ranks(placement=placement, engine={"process": {}})
    found.rollouts.call = lambda method: [2] * rank_counts if method == "take_restarts" else None
    assert found.take_restarts() == {"rollout/engine_restarts": 2 * rank_counts}
