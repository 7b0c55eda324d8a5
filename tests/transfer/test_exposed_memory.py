"""Weights that the sender writes where the only receiver serves them from."""

import math
from datetime import timedelta
from functools import partial

import pytest
import torch
from ends import DictReceiver, DictSender, Died, kill_self, on, random_weights, run_ends, same

from shardwise.memfd import SharedTensors
from shardwise.transfer import (
    DeltaDecoder,
    DeltaEncoder,
    MediumError,
    ProcessGroupMedium,
    SharedMemoryMedium,
    WeightSyncError,
    pull_weights,
    push_weights,
)

BUCKET_BYTES = 4096


def weights_of(version: int, *, deltas: bool = False) -> dict[str, torch.Tensor]:
    """With `deltas` two numbers are all that version 2 has changed; else nothing is as in version 1."""
    if not deltas:
        return random_weights(version)
    weights = random_weights(1)
    weights["embed"][:2, 4] += version
    return weights


class Served(DictReceiver):
    """A dict's tensors in memory that the sender may write to. It copies nothing that lies where it is served."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(random_weights(seed))
        self.memory = SharedTensors(self.weights.values())

    def load_weights(self, weights) -> None:
        self.version = None
        self.loaded = [name for name, _ in weights]


def push(join, *, medium=SharedMemoryMedium, before=lambda name: None, deltas=False):
    """The receipts of one sync after the other, and how many bytes of buckets carried each."""
    end, encoder, found = join(medium), DeltaEncoder() if deltas else None, []
    for version in (1, 2):
        carried = []
        send = end.send

        def counted(header, packed, laid, send=send, carried=carried):
            carried.append(sum(map(len, [packed, *laid])))
            send(header, packed, laid)

        end.send = counted
        try:
            receipt = push_weights(
                DictSender(weights_of(version, deltas=deltas), before).named_weights(torch.bfloat16),
                end,
                version=version,
                bucket_bytes=BUCKET_BYTES,
                delta=encoder,
            )
        except WeightSyncError as error:
            return found, error
        finally:
            end.send = send
        found.append((receipt, sum(carried)))
    return found, None


def pull(join, *, timeout=20):
    """(receipt, whether all is served as sent, version, what had to be loaded) of each sync."""
    end, receiver, found = join(SharedMemoryMedium, timeout=timedelta(seconds=timeout)), Served(), []
    for version in (1, 2):
        try:
            receipt = pull_weights(receiver, end, version=version, memory=receiver.memory)
        except WeightSyncError as error:
            return found, (error, receiver.version)
        found.append((receipt, same(receiver.weights, weights_of(version)), receiver.version, receiver.loaded))
    return found, None


def test_tensors_are_written_where_they_are_served_and_buckets_carry_none_of_their_bytes(tmp_path):
    (sent, _), (received, _) = run_ends([push, pull], tmp_path)
    num_bytes = sum(tensor.nbytes for tensor in random_weights(0).values())
    for (sending, carried), (receiving, is_same, _, loaded) in zip(sent, received, strict=True):
        assert sending == receiving
        assert is_same
        assert receiving.num_proven == receiving.num_tensors == len(random_weights(0))
        assert sending.num_bytes_moved == receiving.num_bytes_moved == num_bytes
        assert carried == 0
        assert loaded in ([], ["empty"])
    assert [version for _, _, version, _ in received] == [1, 2]


@pytest.mark.parametrize(
    ("medium", "num_receivers"), [(SharedMemoryMedium, 2), (ProcessGroupMedium, 1)], ids=["two receivers", "gloo"]
)
def test_where_that_cannot_be_buckets_carry_the_weights(tmp_path, medium, num_receivers):
    functions = [partial(push, medium=medium), *[partial(copying, medium, deltas=False)] * num_receivers]
    (sent, _), *received = run_ends(functions, tmp_path)
    assert len(sent) == 2
    assert received == [[True, True]] * num_receivers


def copying(medium, join, *, deltas):
    """Whether all is served as sent, of each sync into an engine that copies what it is given."""
    end, receiver, found = join(medium), DictReceiver(random_weights(0)), []
    memory, decoder = SharedTensors(receiver.weights.values()), DeltaDecoder() if deltas else None
    for version in (1, 2):
        pull_weights(receiver, end, version=version, delta=decoder, memory=memory)
        found.append(same(receiver.weights, weights_of(version, deltas=deltas)))
    return found


def test_changes_go_in_buckets_and_what_is_sent_whole_is_written_where_it_is_served(tmp_path):
    pulling = partial(copying, SharedMemoryMedium, deltas=True)
    (sent, _), received = run_ends([partial(push, deltas=True), pulling], tmp_path)
    (_, first), (_, second) = sent
    assert first == 0
    assert 0 < second < random_weights(0)["embed"].nbytes
    assert received == [True, True]


def test_f6_a_sender_that_dies_while_it_writes_leaves_nothing_to_generate_with(tmp_path):
    sender, (found, (error, version)) = run_ends(
        [partial(push, before=on("scalar", kill_self)), partial(pull, timeout=5)], tmp_path
    )
    assert isinstance(sender, Died)
    assert found == []
    assert isinstance(error, MediumError)
    assert version is None


def test_f7_a_receiver_that_dies_is_named(tmp_path):
    (sent, error), receiver = run_ends([push, pull_and_die], tmp_path)
    assert len(sent) == 1
    assert isinstance(error, MediumError)
    assert "receiver 1" in str(error)
    assert isinstance(receiver, Died)


def pull_and_die(join):
    end, receiver = join(SharedMemoryMedium), Served()
    pull_weights(receiver, end, version=1, memory=receiver.memory)
    kill_self()


def push_not_a_number(join):
    weights = random_weights(1)
    weights["experts"][2, 3, 4] = math.nan
    with pytest.raises(WeightSyncError, match="weight sync 1: experts holds values that are not finite") as caught:
        push_weights(DictSender(weights).named_weights(torch.bfloat16), join(SharedMemoryMedium), version=1)
    return str(caught.value)


def test_a_weight_that_is_not_finite_is_refused_by_name_and_not_committed(tmp_path):
    at_sender, (_, (error, version)) = run_ends([push_not_a_number, pull], tmp_path)
    assert at_sender in str(error)
    assert version is None


class Flipped(Served):
    """One bit of what was written changes before it is hashed."""

    def served_checksums(self):
        self.weights["embed"].view(torch.int16)[3, 4] ^= 1
        return super().served_checksums()


def pull_flipped(join):
    receiver = Flipped()
    with pytest.raises(WeightSyncError, match="the engine serves other values of embed than were sent"):
        pull_weights(receiver, join(SharedMemoryMedium), version=1, memory=receiver.memory)
    return receiver.version


def test_a_bit_that_flips_where_it_is_served_is_found(tmp_path):
    (_, error), version = run_ends([push, pull_flipped], tmp_path)
    assert "failed at receiver 1" in str(error)
    assert version is None
