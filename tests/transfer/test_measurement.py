"""A rate is checked against what a copy of the same bytes takes here, since a machine's own is not known."""

import time
from functools import partial

import pytest
import torch
from ends import DictReceiver, DictSender, random_weights, run_ends, same

from shardwise.memfd import SharedTensors
from shardwise.transfer import ProcessGroupMedium, SharedMemoryMedium, pull_weights, push_weights
from shardwise.transfer.measurement import seconds_per_byte_inside, seconds_per_byte_sent, take_pieces

NUM_BYTES = 1 << 25


def seconds_per_byte_of_a_copy() -> float:
    source, target = torch.zeros(2, NUM_BYTES, dtype=torch.uint8)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return min(seconds) / NUM_BYTES


def push(medium, join):
    end = join(medium)
    measured = seconds_per_byte_sent(end)
    push_weights(DictSender(random_weights(1)).named_weights(torch.bfloat16), end, version=1)
    return measured, seconds_per_byte_of_a_copy()


def pull(medium, is_exposed, join):
    end, receiver = join(medium), DictReceiver(random_weights(0))
    memory = SharedTensors(receiver.weights.values()) if is_exposed else None
    take_pieces(end, is_exposed=is_exposed)
    pull_weights(receiver, end, version=1, memory=memory)
    return same(receiver.weights, random_weights(1))


@pytest.mark.parametrize(
    ("medium", "is_exposed", "num_receivers"),
    [(ProcessGroupMedium, False, 2), (SharedMemoryMedium, False, 2), (SharedMemoryMedium, True, 1)],
)
def test_what_a_medium_takes_for_a_byte_is_measured_before_weights_travel(medium, is_exposed, num_receivers, tmp_path):
    pulling = [partial(pull, medium, is_exposed)] * num_receivers
    (measured, copied), *received = run_ends([partial(push, medium), *pulling], tmp_path)
    assert copied / 5 < measured < copied * 500
    assert received == [True] * num_receivers


def inside() -> tuple[float, float]:
    torch.set_num_threads(1)
    return seconds_per_byte_inside(torch.device("cpu")), seconds_per_byte_of_a_copy()


@pytest.mark.parametrize("world_size", [1, 2])
def test_inside_a_rank_it_is_gathering_and_copying(run_ranks, world_size):
    for measured, copied in run_ranks(inside, world_size):
        assert copied / 5 < measured < copied * 500
