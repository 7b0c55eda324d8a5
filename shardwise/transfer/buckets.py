"""Packs tensors into buckets of bytes. Small ones share the bucket's first block. Large ones are blocks of their own,
and go straight from where they lie to where they are served if the medium can; what is larger than a bucket goes in
pieces.

Nothing is pickled: a header is JSON, the data are the tensors' bytes.
"""

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor

from shardwise.transfer.medium import Medium, Place, nowhere
from shardwise.transfer.receipt import WeightSyncError

MAX_HEADER_BYTES = 1 << 15
"""The most that a medium carries beside a bucket's data."""

DEFAULT_BUCKET_BYTES = 1 << 24
_ALIGNMENT_BYTES = 16
_HEADER_RESERVE_BYTES = 512
_CHECKSUM_BYTES = 22
"""The most that a checksum takes in a header."""


Encoding = Literal["whole", "delta", "placed"]
"""whole: the tensor's own bytes. delta: only what changed. placed: whole, and already where it is served."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as it travels.

    Example: `Entry("model.norm.weight", "bfloat16", (1024,), encoding="whole", num_bytes=2048)`
    """

    name: str
    dtype: str
    """torch's name of the dtype, without the prefix."""
    shape: tuple[int, ...]
    encoding: Encoding
    num_bytes: int
    """Bytes that travel."""

    @classmethod
    def of(cls, name: str, tensor: Tensor, encoding: Encoding, num_bytes: int) -> Self:
        """Describes `tensor`, which travels as `num_bytes` bytes."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, dtype, tuple(tensor.shape), encoding, num_bytes)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightSyncError(f"{self.name} was sent as {self.dtype!r}, which is no dtype")
        return dtype

    def tensor(self, payload: Tensor) -> Tensor:
        """Views the payload of a tensor that traveled whole: [num_bytes] uint8 -> `shape`, the same memory."""
        return payload.view(self.torch_dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of an entry's bytes that one bucket holds."""

    entry: Entry
    start: int
    """Where it begins in the entry's bytes."""
    block: int
    """The block of the bucket that it is in."""
    offset: int
    """Where it begins in the block."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Describes what a bucket holds."""

    version: int
    index: int
    segments: list[Segment]
    block_bytes: list[int]
    """Bytes of each of the bucket's blocks."""
    checksums: list[int]
    """xxh3 of what the receiver has to end up with, of the next entries that have none yet. They may come later than
    their entries, because tensors are hashed while they travel; all have come with the last bucket."""
    is_last: bool
    failure: str = ""
    """Why the sender gives up; such a bucket is the last."""

    def encode(self) -> str:
        """Returns the header as JSON."""
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps(content | {"segments": [_encode(segment) for segment in self.segments]})

    @classmethod
    def decode(cls, text: str) -> Self:
        """Returns the header that `encode` was called on."""
        content = json.loads(text)
        return cls(**content | {"segments": [_decode(fields) for fields in content["segments"]]})


def as_bytes(tensor: Tensor) -> Tensor:
    """Views a contiguous tensor as [num_bytes] uint8, the same memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def aligned(num_bytes: int) -> int:
    """Rounds a number of bytes up, so that what lies behind them can be viewed as any dtype."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def encode_whole(_name: str, tensor: Tensor) -> tuple[Encoding, Tensor]:
    """Encodes a tensor as its own bytes."""
    return "whole", as_bytes(tensor)


class BucketWriter:
    """Puts entries into buckets, small ones as copies and large ones as they lie, and sends each bucket when it is
    full."""

    def __init__(self, medium: Medium, *, version: int, bucket_bytes: int) -> None:
        if bucket_bytes < _ALIGNMENT_BYTES or bucket_bytes % _ALIGNMENT_BYTES:
            raise ValueError(f"bucket_bytes={bucket_bytes} is not a positive multiple of {_ALIGNMENT_BYTES}")
        self._medium, self._version, self._bucket_bytes = medium, version, bucket_bytes
        self._num_sent = 0
        self._packed: Tensor | None = None
        """The first block of the bucket that is being filled."""
        self._laid: list[Tensor] = []
        """Its other blocks."""
        self._segments: list[Segment] = []
        self._used, self._header_bytes = 0, _HEADER_RESERVE_BYTES
        self._checksums: list[int] = []
        """Those that the next header takes along."""
        self._num_unproven = 0
        """Entries whose checksums are still to come."""
        self._exposed = medium.exposed()
        self.num_bytes = 0
        """Bytes sent so far."""

    def place(self, name: str, payload: Tensor) -> bool:
        """Writes payload [num_bytes] uint8, a whole tensor, straight to where it is served; False if the receiver has
        not exposed that memory. Its entry still has to be written."""
        place = self._exposed.get(name)
        if place is None or len(place) != len(payload):
            return False
        place.copy_(payload)
        return True

    def write(self, entry: Entry, payload: Tensor) -> None:
        """Sends an entry and its payload [entry.num_bytes] uint8 on the medium's device. The payload has to keep its
        values: receivers get them before this returns or by the end of the sync. For a placed entry no bytes are
        sent. Its checksum may come later."""
        self._num_unproven += 1
        if entry.encoding == "placed":
            self._put(entry, payload[:0])
            self.num_bytes += entry.num_bytes
        elif entry.num_bytes <= self._bucket_bytes:
            self._put(entry, payload)
        else:
            for start in range(0, entry.num_bytes, self._bucket_bytes):
                self._put(entry, payload[start : start + self._bucket_bytes], start)
                self._flush(is_last=False)

    def prove(self, checksum: int) -> None:
        """Sends the checksum of the next entry that has none: xxh3 of the tensor that the receiver has to end up
        with."""
        self._num_unproven -= 1
        self._make_room(_CHECKSUM_BYTES)
        self._checksums.append(checksum)

    def finish(self) -> None:
        """Sends what is left, after all entries were proven."""
        assert not self._num_unproven
        self._flush(is_last=True)

    def give_up(self, reason: str) -> None:
        """Tells the receivers that no more will come."""
        header = Header(self._version, self._num_sent, [], [0], [], is_last=True, failure=reason)
        self._medium.send(header.encode(), self._filled()[:0])

    def _put(self, entry: Entry, part: Tensor, start: int = 0) -> None:
        """Puts a part of the entry's bytes into the bucket, after sending what has no room beside it."""
        num_bytes = len(part)
        segment_bytes = len(json.dumps(_encode(Segment(entry, start, len(self._laid), self._used, num_bytes)))) + 16
        self._make_room(segment_bytes, num_bytes)
        if num_bytes >= self._medium.large_bytes:
            self._laid.append(part)
            self._segments.append(Segment(entry, start, len(self._laid), 0, num_bytes))
            return
        self._segments.append(Segment(entry, start, 0, self._used, num_bytes))
        self._filled()[self._used : self._used + num_bytes].copy_(part)
        self._used += aligned(num_bytes)

    def _make_room(self, header_bytes: int, num_bytes: int = 0) -> None:
        """Takes room in the bucket's header, after sending what has none beside it and beside so many bytes of data."""
        num_used = self._used + sum(map(len, self._laid))
        has_room = num_used + num_bytes <= self._bucket_bytes and self._header_bytes + header_bytes <= MAX_HEADER_BYTES
        if (self._segments or self._checksums) and not has_room:
            self._flush(is_last=False)
        self._header_bytes += header_bytes

    def _filled(self) -> Tensor:
        if self._packed is None:
            self._packed = self._medium.buffer(self._bucket_bytes)
        return self._packed

    def _flush(self, *, is_last: bool) -> None:
        blocks = [self._filled()[: self._used], *self._laid]
        sizes = [len(block) for block in blocks]
        header = Header(self._version, self._num_sent, self._segments, sizes, self._checksums, is_last)
        self._medium.send(header.encode(), blocks[0], blocks[1:])
        self.num_bytes += sum(sizes)
        self._num_sent += 1
        self._packed, self._laid, self._segments, self._checksums = None, [], [], []
        self._used, self._header_bytes = 0, _HEADER_RESERVE_BYTES


class Assembly:
    """Memory in which tensors that come in parts are put together, one at a time. On the host it is kept, as large as
    the largest of them, because new pages cost several times what the copy into them does."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int, device: torch.device) -> Tensor:
        """Returns [num_bytes] uint8, valid until the next call."""
        if device.type != "cpu":  # the device's allocator keeps memory itself
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if len(self._kept) < num_bytes:
            self._kept = torch.empty(num_bytes, dtype=torch.uint8)
        return self._kept[:num_bytes]


class BucketReader:
    """Receives buckets and puts the entries in them together again."""

    def __init__(
        self,
        receive: Callable[[Place], tuple[str, list[Tensor]]],
        assembly: Assembly | None = None,
    ) -> None:
        """
        Args:
            receive: as Medium.receive.
            assembly: kept from an earlier reader; None: a new one.
        """
        self._receive_bucket = receive
        self._assembly = Assembly() if assembly is None else assembly
        self._num_received = 0
        self.version: int | None = None
        """Version of the weights that arrive; known from the first bucket on."""
        self.is_finished = False
        """Whether the last bucket has come."""
        self.is_exhausted = False
        """Whether all entries were taken."""
        self.num_bytes = 0
        """Bytes received so far."""
        self.checksums: dict[str, int] = {}
        """Name -> what was proven about the entry at the sender; all of them once all entries were taken."""
        self._unproven: deque[str] = deque()
        """Names of entries that came before their checksums."""

    def begin(self, version: int | None, place: Callable[[Entry], Tensor | None] = lambda _: None) -> int:
        """Waits for the first bucket and returns the version of the weights.

        Args:
            version: the one that is due; None: any.
            place: maps an entry of that version to its destination [entry.num_bytes] uint8; entries that come alone in
                a block or in pieces are put there, perhaps before this returns. None: no preference.
        Raises:
            WeightSyncError: another version is due, or the sender gave up.
            MediumError: nothing came in time.
        """
        self._due, self._place = version, place
        self._bucket = self._receive()
        assert self.version is not None
        if version not in (None, self.version):
            raise self._error(f"version {version} is due, but version {self.version} came")
        return self.version

    def entries(self) -> Iterator[tuple[Entry, Tensor]]:
        """Yields each entry with its bytes, [entry.num_bytes] uint8 ([0] for a placed one), which are valid until the
        next entry is taken.

        Raises:
            WeightSyncError: the sender gave up, or a bucket or a part of a tensor is missing.
            MediumError: nothing came in time.
        """
        begun: tuple[Entry, Tensor, int] | None = None
        header, blocks = self._bucket
        while True:
            for segment in header.segments:
                part = blocks[segment.block][segment.offset : segment.offset + segment.num_bytes]
                begun = self._joined(begun, segment, part)
                entry, payload, num_there = begun
                if num_there == entry.num_bytes:
                    begun = None
                    self._unproven.append(entry.name)
                    yield entry, payload
            self._prove(header)
            if header.is_last:
                break
            header, blocks = self._receive()
        if begun is not None:
            raise self._error(f"{begun[0].name} ends after {begun[2]} of {begun[0].num_bytes} bytes")
        if self._unproven:
            raise self._error(f"the checksum of {self._unproven[0]} is missing")
        self.is_exhausted = True

    def drain(self) -> None:
        """Receives what is left and drops it, so that the sender can finish. Raises MediumError."""
        while not self.is_finished:
            header, _ = self._receive_bucket(nowhere)
            self.is_finished = Header.decode(header).is_last

    def _receive(self) -> tuple[Header, list[Tensor]]:
        text, blocks = self._receive_bucket(partial(_places_of_blocks, version=self._due, place=self._place))
        header = Header.decode(text)
        self.is_finished = header.is_last
        if self.version is None:
            self.version = header.version
        if header.failure:
            raise self._error(f"the sender gave up: {header.failure}")
        if header.index != self._num_received:
            raise self._error(f"bucket {header.index} came where bucket {self._num_received} was due")
        if self.version != header.version:
            raise self._error(f"a bucket of version {header.version} came among those of this one")
        self._num_received += 1
        self.num_bytes += sum(map(len, blocks))
        return header, blocks

    def _prove(self, header: Header) -> None:
        """Notes the checksums that came with a bucket."""
        if len(header.checksums) > len(self._unproven):
            raise self._error(f"bucket {header.index} has a checksum of a tensor that did not come")
        for checksum in header.checksums:
            self.checksums[self._unproven.popleft()] = checksum

    def _joined(
        self,
        begun: tuple[Entry, Tensor, int] | None,
        segment: Segment,
        part: Tensor,
    ) -> tuple[Entry, Tensor, int]:
        """Adds a segment to the entry so far. Returns the entry, its bytes, and how many of them have arrived."""
        entry = segment.entry
        if part.numel() != segment.num_bytes:
            raise self._error(f"{entry.name} has {part.numel()} of {segment.num_bytes} bytes in a bucket")
        before, there = (None, 0) if begun is None else (begun[0], begun[2])
        if segment.start != there or before not in (None, entry):
            name = entry.name if before is None else before.name
            raise self._error(f"a part of {name} is missing from byte {there} on")
        if entry.encoding == "placed":
            self.num_bytes += entry.num_bytes
            return entry, part, entry.num_bytes
        if begun is None:
            if segment.num_bytes == entry.num_bytes:
                return entry, part, segment.num_bytes
            whole = self._place(entry)
            begun = entry, self._assembly.room(entry.num_bytes, part.device) if whole is None else whole, 0
        payload = begun[1]
        target = payload[there : there + segment.num_bytes]
        if part.data_ptr() != target.data_ptr():
            target.copy_(part)
        return entry, payload, there + segment.num_bytes

    def _error(self, message: str) -> WeightSyncError:
        return WeightSyncError(f"weight sync{'' if self.version is None else f' {self.version}'}: {message}")


def _places_of_blocks(
    text: str, *, version: int | None, place: Callable[[Entry], Tensor | None]
) -> list[Tensor | None]:
    """The destinations of blocks that hold nothing but one entry or a piece of it; None for others, and for all in a
    bucket of another version than is due."""
    header = Header.decode(text)
    places: list[Tensor | None] = [None] * len(header.block_bytes)
    if version not in (None, header.version):
        return places
    for segment in header.segments:
        if segment.num_bytes == header.block_bytes[segment.block] and (whole := place(segment.entry)) is not None:
            places[segment.block] = whole[segment.start : segment.start + segment.num_bytes]
    return places


def _encode(segment: Segment) -> list[Any]:
    entry = segment.entry
    fields = [entry.name, entry.dtype, entry.shape, entry.encoding, entry.num_bytes]
    return [*fields, segment.start, segment.block, segment.offset, segment.num_bytes]


def _decode(fields: list[Any]) -> Segment:
    name, dtype, shape, encoding, num_bytes, *place = fields
    return Segment(Entry(name, dtype, tuple(shape), encoding, num_bytes), *place)
