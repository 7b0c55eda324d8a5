"""Weights over a process group of their own, between real processes that have other default groups or none."""

import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ends import DictReceiver, DictSender, Died, kill_self, on, random_weights, run_ends, same, stop_self

from shardwise.transfer import MediumError, ProcessGroupMedium, WeightSyncError, pull_weights, push_weights

TIMEOUT_SECONDS = 4


def nothing(name: str) -> None:
    pass


def push(join, *, before=nothing, tamper=nothing, num_syncs=1, timeout_seconds=20):
    """The receipts; or the error and the seconds after which it came."""
    medium = join(ProcessGroupMedium, timeout=timedelta(seconds=timeout_seconds))
    started, receipts = time.monotonic(), []
    try:
        for version in range(1, num_syncs + 1):
            weights = random_weights(version)
            tamper(weights)
            sender = DictSender(weights, before)
            receipts.append(push_weights(sender, medium, version=version, dtype=torch.bfloat16, bucket_bytes=4096))
        return receipts
    except WeightSyncError as error:
        return error, time.monotonic() - started


def pull(join, *, before=nothing, num_syncs=1, timeout_seconds=20, version=None):
    """The receipts; or the error and the version that the engine would generate with."""
    medium = join(ProcessGroupMedium, timeout=timedelta(seconds=timeout_seconds))
    receiver, receipts = DictReceiver(random_weights(0), before), []
    try:
        for expected in range(1, num_syncs + 1):
            receipts.append(pull_weights(receiver, medium, version=version))
            assert same(receiver.weights, random_weights(expected)), "other weights arrived"
            assert receiver.version == expected
        return receipts
    except WeightSyncError as error:
        return error, receiver.version


def test_every_receiver_holds_what_was_sent_and_all_receipts_are_equal(tmp_path):
    sent, *received = run_ends([partial(push, num_syncs=3)] + 2 * [partial(pull, num_syncs=3)], tmp_path)
    assert received == [sent, sent]
    weights = random_weights(3)
    assert [receipt.version for receipt in sent] == [1, 2, 3]
    assert sent[2].num_tensors == received[0][2].num_proven == len(weights)
    assert sent[2].num_bytes == sum(tensor.nbytes for tensor in weights.values())
    assert sent[1].digest != sent[2].digest


def drop_norm(weights) -> None:
    del weights["norm"]


def reshape_norm(weights) -> None:
    weights["norm"] = weights["norm"].view(3, 11)


def rename_norm(weights) -> None:
    weights["rmsnorm"] = weights.pop("norm")


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (drop_norm, "the engine serves norm, which was not sent"),
        (reshape_norm, "norm was sent as torch.bfloat16 [3, 11], the engine serves torch.bfloat16 [33]"),
        (rename_norm, "rmsnorm was sent, which the engine does not serve"),
    ],
)
def test_weights_that_do_not_fit_are_named_at_every_end_and_nothing_is_committed(tmp_path, tamper, named):
    (at_sender, _), *received = run_ends([partial(push, tamper=tamper), pull, pull], tmp_path)
    assert str(at_sender) == f"weight sync 1 failed at receiver 1: weight sync 1: {named}"
    assert [(str(error), version) for error, version in received] == 2 * [(f"weight sync 1: {named}", None)]


def test_one_receiver_that_refuses_stops_the_others_from_committing(tmp_path):
    (at_sender, _), refusing, other = run_ends([push, partial(pull, version=7), pull], tmp_path)
    assert str(refusing[0]) == "weight sync 1: version 7 is due, but version 1 came"
    for error in (at_sender, other[0]):
        assert str(error) == f"weight sync 1 failed at receiver 1: {refusing[0]}"
    assert (refusing[1], other[1]) == (0, None)  # the one that refused took no tensor: it serves what it served


def fail() -> None:
    raise OSError("no such shard")


def push_and_fail(join):
    """The sender's own error goes on as it is."""
    with pytest.raises(OSError, match="no such shard"):
        push(join, before=on("scalar", fail))


def test_a_sender_that_fails_says_so_to_its_receivers(tmp_path):
    _, received = run_ends([push_and_fail, pull], tmp_path)
    assert str(received[0]) == "weight sync 1: the sender gave up: OSError: no such shard"
    assert received[1] is None


@pytest.mark.parametrize("act", [kill_self, stop_self], ids=["killed", "stopped"])
def test_a_receiver_lost_in_mid_sync_is_named_within_the_timeout(tmp_path, act):
    lost = partial(pull, before=on("experts", act), timeout_seconds=TIMEOUT_SECONDS)
    ends = [partial(push, timeout_seconds=TIMEOUT_SECONDS), lost, partial(pull, timeout_seconds=TIMEOUT_SECONDS)]
    (at_sender, seconds), gone, (at_other, version) = run_ends(ends, tmp_path)
    assert isinstance(gone, Died)
    assert isinstance(at_sender, MediumError)
    assert isinstance(at_other, MediumError)
    for error in (at_sender, at_other):
        assert "receiver 1" in str(error)
        assert "receiver 2" not in str(error)
    # A closed connection is noticed at once, silence after the timeout; two seconds more to ask who is still there.
    assert seconds < (0 if act is kill_self else TIMEOUT_SECONDS) + 4
    assert version is None


@pytest.mark.parametrize("act", [kill_self, stop_self], ids=["killed", "stopped"])
def test_a_sender_lost_in_mid_sync_is_named_and_no_receiver_commits(tmp_path, act):
    ends = [partial(push, before=on("scalar", act), timeout_seconds=TIMEOUT_SECONDS)]
    gone, *received = run_ends(ends + 2 * [partial(pull, timeout_seconds=TIMEOUT_SECONDS)], tmp_path)
    assert isinstance(gone, Died)
    for error, version in received:
        assert isinstance(error, MediumError)
        assert str(error).endswith("nothing was heard from the sender")
        assert version is None


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
