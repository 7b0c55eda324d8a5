"""What is of the process group alone; what every medium does is in test_medium.py."""

import os
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from ends import DictReceiver, DictSender, kill_self, run_ends, same, stop_self

from shardwise.transfer import MediumError, ProcessGroupMedium, WeightSyncError, pull_weights, push_weights, sync
from shardwise.transfer.buckets import Entry
from shardwise.transfer.medium import Rendezvous


def absent(join):
    stop_self()


def join_alone(join):
    """What it says when an end never comes."""
    with pytest.raises(MediumError) as caught:
        join(ProcessGroupMedium, timeout=timedelta(seconds=1))
    return str(caught.value)


def test_an_end_that_never_joins_is_named(tmp_path):
    said, *_ = run_ends([join_alone, absent], tmp_path)
    assert said == "joining the process group: waited 1 s for receiver 1"


def test_backend_and_device_have_to_fit():
    with pytest.raises(ValueError, match="backend=nccl and device=cpu; gloo carries buckets on the host"):
        ProcessGroupMedium.join(dist.HashStore(), 0, 2, backend="nccl")
    with pytest.raises(ValueError, match="size=1; give 2 or more"):
        ProcessGroupMedium.join(dist.HashStore(), 0, 1)


def test_closing_aborts_what_nccl_has_in_flight():
    group, timeout = Mock(spec=["abort"]), timedelta(seconds=1)  # no GPU: only what close asks of the group
    rendezvous = Rendezvous(dist.HashStore(), 0, 2, timeout=timeout)
    medium = ProcessGroupMedium(group, rendezvous, is_gloo=False, timeout=timeout, device=torch.device("cpu"))
    medium.close()
    medium.close()  # after `break_off` it is closed
    group.abort.assert_called_once_with()


def large_weights(seed: int) -> dict[str, torch.Tensor]:
    """Larger than a bucket of 16 MiB (17.2 MB), larger than what shares one (8.6 MB), on both sides of them small ones;
    `turned` is served from memory in another order."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"first": (1225, 7001), "a": (33,), "large": (2051, 2099), "b": (5,), "turned": (2050, 2100), "c": (1, 7)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


class WatchingReceiver(DictReceiver):
    """Notes which tensors came to lie where they are served, and fails before the one called `fails_before`."""

    def __init__(self, fails_before: str | None = None) -> None:
        super().__init__(large_weights(0))
        self.weights["turned"] = self.weights["turned"].t().contiguous().t()
        self.received_in_place: set[str] = set()
        self._fails_before = fails_before

    def load_weights(self, weights) -> None:
        super().load_weights(self._watched(weights))

    def _watched(self, weights):
        for name, tensor in weights:
            if name == self._fails_before:
                raise OSError("no more")
            if tensor.is_set_to(self.weights[name]):
                self.received_in_place.add(name)
            yield name, tensor


def push_large(num_syncs, join):
    medium = join(ProcessGroupMedium)
    try:
        return [
            push_weights(
                DictSender(large_weights(version)).named_weights(torch.bfloat16),
                medium,
                version=version,
                bucket_bytes=1 << 24,
            )
            for version in range(1, num_syncs + 1)
        ]
    except WeightSyncError as error:
        return str(error)


def pull_large(num_syncs, join):
    medium, receiver = join(ProcessGroupMedium), WatchingReceiver()
    receipts = []
    for version in range(1, num_syncs + 1):
        receipts.append(pull_weights(receiver, medium))
        assert same(receiver.weights, large_weights(version))
    return receipts, receiver.received_in_place


@pytest.mark.parametrize("num_receivers", [1, 2, 3])
def test_large_weights_are_received_where_they_are_served(tmp_path, num_receivers):
    """Sent to each of one or two receivers, broadcast to more."""
    sent, *received = run_ends([partial(push_large, 3), *num_receivers * [partial(pull_large, 3)]], tmp_path)
    assert received == num_receivers * [(sent, {"first", "large"})]
    assert received[0][0][2].num_proven == 6


def pull_and_fail(join):
    receiver = WatchingReceiver(fails_before="large")
    with pytest.raises(OSError, match="no more"):
        pull_weights(receiver, join(ProcessGroupMedium))
    return receiver.version


@pytest.mark.parametrize("num_receivers", [1, 3])
def test_weights_of_which_some_are_in_place_are_not_committed(tmp_path, num_receivers):
    sent, *versions = run_ends([partial(push_large, 1), *num_receivers * [pull_and_fail]], tmp_path)
    assert sent == "weight sync 1 failed at receiver 1: OSError: no more"
    assert versions == num_receivers * [None]


def pull_once_and_die(join):
    pull_weights(WatchingReceiver(), join(ProcessGroupMedium))
    os._exit(1)


def push_to_the_dead(join):
    """What it says of each sync."""
    medium = join(ProcessGroupMedium, timeout=timedelta(seconds=20))
    push = partial(push_weights, medium=medium, bucket_bytes=1 << 24)
    push(DictSender(large_weights(1)).named_weights(torch.bfloat16), version=1)
    with pytest.raises(MediumError) as caught:
        push(DictSender(large_weights(2)).named_weights(torch.bfloat16), version=2)
    return str(caught.value)


def pull_beside_the_dead(join):
    medium, receiver = join(ProcessGroupMedium, timeout=timedelta(seconds=20)), WatchingReceiver()
    pull_weights(receiver, medium)
    with pytest.raises(MediumError) as caught:
        pull_weights(receiver, medium)
    return str(caught.value), receiver.version


@pytest.mark.parametrize("num_others", [0, 1, 2])
def test_a_receiver_that_dies_between_syncs_is_noticed_at_every_end(tmp_path, num_others):
    ends = [push_to_the_dead, *num_others * [pull_beside_the_dead], pull_once_and_die]
    started = time.monotonic()
    said, *others, _ = run_ends(ends, tmp_path)
    assert f"receiver {num_others + 1}" in said.partition("nothing was heard from")[2]
    assert all("nothing was heard from" in message and version in (1, None) for message, version in others)
    assert time.monotonic() - started < 60


def pull_another_version(join):
    receiver = WatchingReceiver()
    with pytest.raises(WeightSyncError, match="version 7 is due, but version 1 came"):
        pull_weights(receiver, join(ProcessGroupMedium), version=7)
    return receiver.version, same(receiver.weights, large_weights(0))


def test_weights_of_another_version_are_not_received_where_weights_are_served(tmp_path):
    _, received = run_ends([partial(push_large, 1), pull_another_version], tmp_path)
    assert received == (0, True)


def push_one_bucket_and_die(join):
    medium = join(ProcessGroupMedium)
    send = medium.send

    def send_once(*bucket):
        send(*bucket)
        kill_self()

    medium.send = send_once
    push_weights(DictSender(large_weights(1)).named_weights(torch.bfloat16), medium, version=1, bucket_bytes=1 << 24)


def pull_what_breaks_off(join):
    receiver = WatchingReceiver()
    with pytest.raises(MediumError):
        pull_weights(receiver, join(ProcessGroupMedium))
    return receiver.version, same(receiver.weights, large_weights(0))


def test_an_engine_generates_no_more_once_a_bucket_was_received_where_it_serves_from(tmp_path):
    _, received = run_ends([push_one_bucket_and_die, pull_what_breaks_off], tmp_path)
    assert received == (None, False)


def push_an_unknown_dtype(join):
    """As from a later release of torch."""
    of = Entry.of
    sync.Entry = Mock(of=lambda *given: replace(of(*given), dtype="float2"))  # only in this process
    return push_large(1, join)


def pull_an_unknown_dtype(join):
    receiver = WatchingReceiver()
    with pytest.raises(WeightSyncError) as caught:
        pull_weights(receiver, join(ProcessGroupMedium))
    return str(caught.value)


def test_a_dtype_that_the_receiver_does_not_know_is_said_at_both_ends(tmp_path):
    sent, received = run_ends([push_an_unknown_dtype, pull_an_unknown_dtype], tmp_path)
    assert received == "first was sent as 'float2', which is no dtype"
    assert sent == f"weight sync 1 failed at receiver 1: {received}"
