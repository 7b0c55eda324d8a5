"""Changes of tensors against the last version, in one process and over a process group."""

from functools import partial

import pytest
import torch
from ends import DictReceiver, DictSender, random_weights, run_ends, same

from shardwise.transfer import (
    DeltaDecoder,
    DeltaEncoder,
    ProcessGroupMedium,
    WeightSyncError,
    pull_weights,
    push_weights,
)
from shardwise.transfer.buckets import Entry

NUM_ELEMENTS = 200_000  # more than three blocks of positions


def encoder_of(tensor: torch.Tensor) -> DeltaEncoder:
    encoder = DeltaEncoder()
    encoder.begin([None])
    assert encoder.encode("a", tensor)[0] == "whole"
    encoder.commit(1)
    encoder.begin([1])
    return encoder


def changed_at(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """One bit of each of these elements differs."""
    result = tensor.clone()
    result.view(-1).view(torch.uint8).view(tensor.numel(), -1)[places, 0] ^= 1
    return result


def random_bits(dtype: torch.dtype) -> torch.Tensor:
    """Every pattern of bits, NaNs and infinities among them (bool has two)."""
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (NUM_ELEMENTS * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(400, -1)


@pytest.mark.parametrize("num_changed", [0, 1, 2000, 70_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.bool], ids=str)
def test_base_and_changes_give_the_new_tensor_bit_by_bit(dtype, num_changed):
    old = random_bits(dtype)
    new = changed_at(old, torch.randperm(NUM_ELEMENTS)[:num_changed])
    encoding, payload = encoder_of(old).encode("a", new)
    entry = Entry.of("a", new, encoding, payload.numel())
    decoded = DeltaDecoder().decode(entry, payload, old)
    assert torch.equal(decoded.view(torch.uint8), new.view(torch.uint8))
    assert decoded.shape == new.shape
    four_blocks = 4 * 8
    cost = num_changed * (dtype.itemsize + 2) + four_blocks if num_changed else 0
    assert payload.numel() == min(cost, new.nbytes)
    assert encoding == ("delta" if cost < new.nbytes else "whole")


def test_zero_and_minus_zero_differ_and_a_nan_is_itself():
    old = torch.tensor([0.0, float("nan"), 1.0, 2.0] * 8)
    new = old.clone()
    new[0] = -0.0
    encoding, payload = encoder_of(old).encode("a", new)
    assert (encoding, payload.numel()) == ("delta", 8 + 6)
    decoded = DeltaDecoder().decode(Entry.of("a", new, encoding, 14), payload, old)
    assert torch.signbit(decoded[0])


def test_changes_add_up_over_versions():
    weights = torch.randn(50, 60).bfloat16()
    encoder, served = encoder_of(weights), weights.clone()
    decoder = DeltaDecoder()
    for version in range(2, 6):
        weights = changed_at(weights, torch.randperm(3000)[:20])
        encoding, payload = encoder.encode("a", weights)
        assert encoding == "delta"
        served = decoder.decode(Entry.of("a", weights, encoding, payload.numel()), payload, served)
        encoder.commit(version)
        encoder.begin([version])
    assert torch.equal(served, weights)


@pytest.mark.parametrize("bases", [[None], [0], [1, 2], [1, None]])
def test_a_receiver_at_another_base_gets_everything(bases):
    tensor = torch.randn(100)
    encoder = encoder_of(tensor)
    encoder.commit(1)
    encoder.begin(bases)
    assert encoder.encode("a", tensor)[0] == "whole"


def test_a_sync_that_was_not_committed_is_no_base():
    tensor = torch.randn(100)
    encoder = encoder_of(tensor)
    encoder.encode("a", changed_at(tensor, torch.tensor([3])))
    encoder.begin([1])
    assert encoder.encode("a", tensor)[0] == "whole"


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (torch.zeros(9, dtype=torch.uint8), "9 bytes are no changes of"),
        (torch.zeros(4, dtype=torch.uint8), "4 bytes are no changes of"),
        (torch.zeros(8 + 4, dtype=torch.uint8), "0 changes are announced, 1 came"),
    ],
)
def test_bytes_that_are_no_changes_are_named(payload, message):
    served = torch.zeros(10, dtype=torch.bfloat16)
    entry = Entry("a", "bfloat16", (10,), "delta", payload.numel())
    with pytest.raises(WeightSyncError, match=f"a: {message}"):
        DeltaDecoder().decode(entry, payload, served)


def versions() -> list[dict[str, torch.Tensor]]:
    """Of three syncs: nothing changes from the first to the second, then one element of a large tensor and all of a
    small one."""
    first = random_weights(1)
    third = {name: tensor.clone() for name, tensor in first.items()}
    third["experts"][2, 3, 4] += 1
    third["norm"] += 1
    return [first, first, third]


def push(join):
    medium, encoder, moved = join(ProcessGroupMedium), DeltaEncoder(), []
    for version, weights in enumerate(versions(), start=1):
        receipt = push_weights(
            DictSender(weights).named_weights(torch.bfloat16), medium, version=version, bucket_bytes=4096, delta=encoder
        )
        moved.append(receipt.num_bytes_moved)
    return moved


def pull(join, *, forgetful_at=0, readable=True):
    """`forgetful_at`: before this sync the engine is a new one, as after a restart."""
    medium, decoder, receiver = (
        join(ProcessGroupMedium),
        DeltaDecoder(),
        DictReceiver(random_weights(0), readable=readable),
    )
    loaded = []
    for version, weights in enumerate(versions(), start=1):
        if version == forgetful_at:
            decoder, receiver = DeltaDecoder(), DictReceiver(random_weights(0), readable=readable)
        pull_weights(receiver, medium, version=version, delta=decoder)
        assert same(receiver.weights, weights)
        assert receiver.version == version
        loaded.append(receiver.loaded)
    return loaded


@pytest.mark.parametrize("readable", [True, False], ids=["read back", "not read back"])
def test_over_a_medium_only_changes_travel(tmp_path, readable):
    moved, loaded = run_ends([push, partial(pull, readable=readable)], tmp_path)
    assert moved[0] > 8000
    assert moved[1:] == [0, 16 + 80]  # one element with its place, and 33 elements whole, to the next multiple of 16
    everything = list(random_weights(0))
    # An engine that can be read back keeps what has not changed; another one may take weights only all together.
    assert loaded == [everything] + ([[], ["norm", "experts"]] if readable else 2 * [everything])


def test_a_receiver_that_was_replaced_makes_the_sync_whole(tmp_path):
    moved, *_ = run_ends([push, pull, partial(pull, forgetful_at=3)], tmp_path)
    assert moved[2] == moved[0]


def test_a_served_tensor_whose_elements_lie_in_another_order_is_a_base_too():
    old = random_bits(torch.bfloat16)
    new = changed_at(old, torch.arange(0, NUM_ELEMENTS, 99))
    encoding, payload = encoder_of(old).encode("a", new)
    served = old.t().contiguous().t()
    assert encoding == "delta"
    assert not served.is_contiguous()
    decoded = DeltaDecoder().decode(Entry.of("a", new, encoding, payload.numel()), payload, served)
    assert torch.equal(decoded.view(torch.uint8), new.view(torch.uint8))
