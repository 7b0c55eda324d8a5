"""Packing into buckets and putting together again, over a medium that is a list."""

import json

import pytest
import torch

from shardwise.transfer import WeightSyncError
from shardwise.transfer.buckets import MAX_HEADER_BYTES, BucketReader, BucketWriter, Entry
from shardwise.transfer.medium import nowhere


class ListMedium:
    """Keeps what is sent; `device`, `meet` and the rest are not needed here."""

    def __init__(self, large_bytes: int = 1 << 30) -> None:
        self.buckets: list[tuple[str, list[torch.Tensor]]] = []
        self.large_bytes = large_bytes
        self._next = 0

    def exposed(self):
        return {}

    def buffer(self, num_bytes):
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def send(self, header, packed, laid=()):
        assert all(len(block) >= self.large_bytes for block in laid)
        self.buckets.append((header, [packed.clone(), *(block.clone() for block in laid)]))

    @property
    def sizes(self) -> list[list[int]]:
        """Of the blocks of each bucket."""
        return [[len(block) for block in blocks] for _, blocks in self.buckets]

    def receive(self, place=nowhere):
        """Into the places, as a process group does."""
        self._next += 1
        header, blocks = self.buckets[self._next - 1]
        there = [*place(header)] or [None] * len(blocks)
        pairs = zip(blocks, there, strict=True)
        return header, [block if target is None else target.copy_(block) for block, target in pairs]


LONGEST = 2**64 - 1
"""The checksum of most digits."""


def entry_of(name: str, payload: torch.Tensor) -> Entry:
    return Entry(name, "uint8", (payload.numel(),), "whole", payload.numel())


def packed(
    payloads: dict[str, torch.Tensor], bucket_bytes: int, large_bytes: int = 1 << 30, num_behind: int = 0
) -> ListMedium:
    """The payloads in buckets. The first one's checksum is LONGEST, each next one's is one less; each is given so many
    tensors later."""
    medium = ListMedium(large_bytes)
    writer = BucketWriter(medium, version=3, bucket_bytes=bucket_bytes)
    for index, (name, payload) in enumerate(payloads.items()):
        writer.write(entry_of(name, payload), payload)
        if index >= num_behind:
            writer.prove(LONGEST - index + num_behind)
    for index in range(max(len(payloads) - num_behind, 0), len(payloads)):
        writer.prove(LONGEST - index)
    writer.finish()
    assert writer.num_bytes == sum(map(sum, medium.sizes))
    return medium


def unpacked(medium: ListMedium) -> dict[str, torch.Tensor]:
    reader = BucketReader(medium.receive)
    assert reader.begin(None) == 3
    found = {entry.name: payload.clone() for entry, payload in reader.entries()}
    assert reader.checksums == {name: LONGEST - index for index, name in enumerate(found)}
    return found


@pytest.mark.parametrize("num_behind", [0, 3])
@pytest.mark.parametrize("large_bytes", [50, 1 << 30])
@pytest.mark.parametrize("bucket_bytes", [16, 64, 4096])
@pytest.mark.parametrize("sizes", [[], [0], [16], [64, 64], [1, 0, 63, 65, 0, 200, 7], [4096, 1, 4095, 9000]])
def test_what_was_packed_comes_out_in_order(sizes, bucket_bytes, large_bytes, num_behind):
    payloads = {f"{i}": torch.randint(0, 256, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}
    medium = packed(payloads, bucket_bytes, large_bytes, num_behind)
    assert all(sum(sizes) <= bucket_bytes for sizes in medium.sizes)
    found = unpacked(medium)
    assert list(found) == list(payloads)
    assert all(torch.equal(found[name], payload) for name, payload in payloads.items())


def test_what_is_larger_than_a_bucket_goes_in_pieces():
    payloads = {
        name: torch.zeros(size, dtype=torch.uint8) for name, size in {"a": 40, "b": 30, "c": 150, "d": 2}.items()
    }
    medium = packed(payloads, 64)
    # b has no room behind a. Beginnings are multiples of 16.
    assert medium.sizes == [[48], [32], [64], [64], [32], [16]]


def test_what_is_large_to_the_medium_is_a_block_of_its_own_and_small_ones_beside_it_share_one():
    sizes = {"a": 8, "b": 32, "c": 8, "d": 8, "e": 100}
    medium = packed({name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}, 64, large_bytes=32)
    assert medium.sizes == [[32, 32], [16], [0, 64], [0, 36], [0]]


@pytest.mark.parametrize("large_bytes", [32, 1 << 30])
def test_what_comes_alone_or_in_pieces_is_put_where_it_is_to_lie(large_bytes):
    sizes = {"first": 100, "small": 8, "alone": 40, "pieces": 150, "elsewhere": 90}
    payloads = {name: torch.randint(0, 256, (size,), dtype=torch.uint8) for name, size in sizes.items()}
    places = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items() if name != "elsewhere"}
    reader = BucketReader(packed(payloads, 64, large_bytes).receive)
    reader.begin(None, lambda entry: places.get(entry.name))
    there = set()
    for entry, payload in reader.entries():
        assert torch.equal(payload, payloads[entry.name])
        if entry.name in places and payload.is_set_to(places[entry.name]):
            there.add(entry.name)
    assert there == {"first", "pieces"} | ({"alone"} if large_bytes == 32 else set())


@pytest.mark.parametrize("num_behind", [0, 100, 300, 3000])
def test_headers_stay_within_what_a_medium_carries(num_behind):
    payloads = {f"model.layers.{i}.a_name_as_long_as_they_are.weight": torch.ones(2).byte() for i in range(3000)}
    medium = packed(payloads, 1 << 20, num_behind=num_behind)
    assert 1 < len(medium.buckets) < 30  # those of headers that are full
    assert max(len(header) for header, _ in medium.buckets) <= MAX_HEADER_BYTES
    reader = BucketReader(medium.receive)
    reader.begin(None)
    assert [entry.name for entry, _ in reader.entries()] == list(reader.checksums) == list(payloads)


def without_bucket(buckets):
    del buckets[1]


def cut_bucket(buckets):
    buckets[1] = (buckets[1][0], [buckets[1][1][0][:10]])


def of_another_version(buckets):
    buckets[1] = (json.dumps(json.loads(buckets[1][0]) | {"version": 4}), buckets[1][1])


def without_a_part(buckets):
    header = json.loads(buckets[1][0])
    buckets[1] = (json.dumps(header | {"segments": []}), buckets[1][1])


def without_checksums(buckets):
    buckets[-1] = (json.dumps(json.loads(buckets[-1][0]) | {"checksums": []}), buckets[-1][1])


def with_a_second_checksum(buckets):
    buckets[-1] = (json.dumps(json.loads(buckets[-1][0]) | {"checksums": [1, 2]}), buckets[-1][1])


def ending_early(buckets):
    buckets[1] = (json.dumps(json.loads(buckets[1][0]) | {"is_last": True}), buckets[1][1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_bucket, "weight sync 3: bucket 2 came where bucket 1 was due"),
        (cut_bucket, "weight sync 3: a has 10 of 64 bytes in a bucket"),
        (of_another_version, "weight sync 3: a bucket of version 4 came among those of this one"),
        (without_a_part, "weight sync 3: a part of a is missing from byte 64 on"),
        (without_checksums, "weight sync 3: the checksum of a is missing"),
        (with_a_second_checksum, "weight sync 3: bucket 5 has a checksum of a tensor that did not come"),
        (ending_early, "weight sync 3: a ends after 128 of 300 bytes"),
    ],
)
def test_damaged_buckets_are_named(damage, message):
    medium = packed({"a": torch.ones(300, dtype=torch.uint8)}, 64)
    damage(medium.buckets)
    with pytest.raises(WeightSyncError) as caught:
        unpacked(medium)
    assert str(caught.value) == message


def test_a_dtype_is_one_of_torch_and_nothing_else():
    with pytest.raises(WeightSyncError, match="a was sent as '__import__', which is no dtype"):
        Entry("a", "__import__", (1,), "whole", 1).torch_dtype  # noqa: B018


def test_a_bucket_size_that_would_split_numbers_is_refused():
    with pytest.raises(ValueError, match="bucket_bytes=100 is not a positive multiple of 16"):
        BucketWriter(ListMedium(), version=1, bucket_bytes=100)
