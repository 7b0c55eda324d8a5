"""Whole tensors from the shards of all ranks, or what each rank needs of them; many small ones in one collective."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.engine.exchange import send_rows
from shardwise.engine.files.conversions import ExportBlock
from shardwise.engine.shards import RowSharding, is_by_rows, local_shard
from shardwise.ops import all_gather_flat
from shardwise.region import Region

BUCKET_BYTES = 1 << 25
"""Whole tensors of up to this many bytes together share an all-gather; a larger one has its own."""


def gathered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Collective for a DTensor. Like `gathered_in_order`, for one tensor."""
    (whole,) = gathered_in_order([(tensor, dtype)])
    return whole


def gathered_in_order(
    tensors: Iterable[tuple[Tensor, torch.dtype]], *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Tensor]:
    """Collective for DTensors. Yields each as a full tensor in its dtype, cast before it is gathered.

    What is yielded lies on the mesh's device, even if shards are kept in host memory, and is never the weight itself:
    whoever receives it may keep it, or freeze its storage. The peak is three buckets, or the largest tensor and this
    rank's part of it. There is no torch.no_grad: around a generator it would keep what was yielded last.
    """
    return _by_buckets((_Part.of(tensor, dtype, None) for tensor, dtype in tensors), bucket_bytes)


def gathered_regions(
    tensors: Iterable[tuple[Tensor, torch.dtype, Sequence[Region] | None]], *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[Tensor]:
    """Collective for DTensors. Like `gathered_in_order`, but yields of each tensor what this rank needs of it, and only
    that is sent to it.

    Args:
        tensors: the third of each is what every rank of the job needs, by rank; None: all need all of it. The same on
            every rank. Ranks that need the same had best have the same object.
    """
    return _by_buckets((_Part.of(*tensor) for tensor in tensors), bucket_bytes)


def gathered_blocks(
    state: Mapping[str, Tensor], blocks: Sequence[ExportBlock]
) -> Iterator[tuple[ExportBlock, list[Tensor]]]:
    """Collective. Yields every block with its runtime tensors, whole and in the dtypes of the file."""
    wholes = gathered_in_order((state[name], block.dtypes[name]) for block in blocks for name in block.runtime_names)
    for block in blocks:
        yield block, [next(wholes) for _ in block.runtime_names]


@dataclass(frozen=True, slots=True)
class _Part:
    """What this rank has of a tensor."""

    tensor: Tensor
    dtype: torch.dtype
    """Dtype of the whole tensor."""
    sharding: RowSharding | None
    """None: the tensor is not sharded by rows."""
    regions: Sequence[Region] | None
    """What every rank of the sharding needs; None: all of the tensor."""

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype, regions: Sequence[Region] | None) -> "_Part":
        """`regions`: by rank of the job."""
        sharding = RowSharding.of(tensor) if is_by_rows(tensor) else None
        if regions is not None and sharding is not None and sharding.num_ranks > 1:
            regions = [regions[rank] for rank in dist.get_process_group_ranks(sharding.group)]
        return cls(tensor.detach(), dtype, sharding, regions)

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.tensor.shape

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def slot(self) -> int:
        """Number of elements that every rank sends: as many as the rank with the most rows has."""
        assert self.sharding is not None
        return self.sharding.num_rows(self.shape[0], 0) * self.shape[1:].numel()

    def fits(self, bucket: list["_Part"], bucket_bytes: int) -> bool:
        """Whether it can share an all-gather with the parts in `bucket`."""
        first = bucket[0]
        return (
            self.sharding is not None
            and self.sharding.num_ranks > 1
            and (self.sharding, self.dtype) == (first.sharding, first.dtype)
            and (self.regions is None) == (first.regions is None)
            and self.num_bytes + sum(part.num_bytes for part in bucket) <= bucket_bytes
        )

    @property
    def needed(self) -> Region:
        """What this rank needs of the tensor."""
        assert self.sharding is not None
        assert self.regions is not None
        return self.regions[self.sharding.rank]

    @property
    def keys(self) -> list[int]:
        """What tells the regions of the ranks apart: equal only for the same object, because comparing a thousand would
        take longer than it saves."""
        assert self.regions is not None
        return [*map(id, self.regions)]

    def leaving(self) -> dict[int, Tensor]:
        """Returns what the rows here hold of every region, flat, by its key: many ranks need the same."""
        assert self.sharding is not None
        assert self.regions is not None
        shard, rows = local_shard(self.tensor), self.sharding.rows(self.shape[0], self.sharding.rank)
        distinct = dict(zip(self.keys, self.regions, strict=True))
        regions = {key: region.among_rows(rows.start, rows.stop) for key, region in distinct.items()}
        return {key: region.of(shard).to(self.sharding.device, self.dtype).flatten() for key, region in regions.items()}

    def coming(self) -> Tensor:
        """Returns how many elements of what this rank needs lie in the rows of every rank: int64 [ranks]."""
        assert self.sharding is not None
        starts, stops = map(torch.tensor, self.sharding.bounds(self.shape[0]))
        num_rows = torch.zeros_like(starts)
        for start, stop in self.needed.spans[0]:
            num_rows += (stops.clamp(max=stop) - starts.clamp(min=start)).clamp(min=0)
        return num_rows * self.needed.shape[1:].numel()

    def assembled(self, pieces: Iterable[tuple[int, Tensor]], received: Tensor) -> Tensor:
        """Puts together what this rank needs, from what ranks hold of it: (rank, elements). They are parts of
        `received`."""
        assert self.sharding is not None
        starts, _ = self.sharding.bounds(self.shape[0])
        in_order = sorted(pieces, key=lambda of_rank: starts[of_rank[0]])
        return torch.cat([received[:0], *(piece for _, piece in in_order)]).view(self.needed.shape)


def _by_buckets(parts: Iterable[_Part], bucket_bytes: int) -> Iterator[Tensor]:
    bucket: list[_Part] = []
    for part in parts:
        if bucket and not part.fits(bucket, bucket_bytes):
            yield from _gather(bucket)
            bucket = []
        bucket.append(part)
    if bucket:
        yield from _gather(bucket)


def _gather(bucket: list[_Part]) -> Iterator[Tensor]:
    """Yields the tensors of parts of one sharding and dtype, or what this rank needs of them. Nothing is kept of a part
    that is alone."""
    if bucket[0].regions is not None:
        yield from _gather_regions(bucket)
        return
    if len(bucket) == 1:
        yield _alone(bucket[0])
        return
    slots = [part.slot for part in bucket]
    for part, by_rank in zip(bucket, _received(bucket).split(slots, dim=1), strict=True):
        assert part.sharding is not None
        yield part.sharding.assembled(by_rank, part.shape)


def _alone(part: _Part) -> Tensor:
    if part.sharding is None:
        assert isinstance(part.tensor, DTensor)
        on_mesh = part.tensor.to(part.tensor.device_mesh.device_type, part.dtype, copy=True)
        assert isinstance(on_mesh, DTensor)
        return on_mesh.full_tensor()
    if part.sharding.num_ranks == 1:
        return local_shard(part.tensor).to(part.sharding.device, part.dtype, copy=True)
    return part.sharding.assembled(_received([part]), part.shape)


def _received(bucket: list[_Part]) -> Tensor:
    """All-gathers the parts: [ranks, elements of all slots]."""
    dtype, sharding, slots = bucket[0].dtype, bucket[0].sharding, [part.slot for part in bucket]
    assert sharding is not None
    sent = torch.empty(sum(slots), dtype=dtype, device=sharding.device)
    for part, slot in zip(bucket, sent.split(slots), strict=True):
        rows = local_shard(part.tensor)
        slot[: rows.numel()].copy_(rows.flatten())
    received = torch.empty(sharding.num_ranks, len(sent), dtype=dtype, device=sharding.device)
    all_gather_flat(received.view(-1), sent, group=sharding.group)
    return received


def _gather_regions(bucket: list[_Part]) -> Iterator[Tensor]:
    if len(bucket) == 1:
        yield _region_alone(bucket[0])
        return
    yield from _exchanged(bucket)


def _region_alone(part: _Part) -> Tensor:
    if part.sharding is None or part.sharding.num_ranks == 1:
        assert part.regions is not None
        return part.regions[dist.get_rank()].of(_alone(part)).clone()
    (needed,) = _exchanged([part])
    return needed


def _exchanged(bucket: list[_Part]) -> list[Tensor]:
    """Sends every rank what it needs of the rows here. Returns what this rank needs of each part."""
    sharding = bucket[0].sharding
    assert sharding is not None
    assert sharding.group is not None
    sent, sizes = _for_every_rank(bucket)
    coming = torch.stack([part.coming() for part in bucket], dim=1)  # [ranks, parts]
    received = send_rows(sent, sizes, coming.sum(dim=1).tolist(), sharding.group)
    if len(bucket) == 1 and sharding.num_parts == 1:  # in the order of the rows already
        return [received.view(bucket[0].needed.shape)]
    arrived = coming.nonzero()
    pieces: list[list[tuple[int, Tensor]]] = [[] for _ in bucket]
    for (rank, index), piece in zip(arrived.tolist(), received.split(coming[*arrived.T].tolist()), strict=True):
        pieces[index].append((rank, piece))
    return [part.assembled(of_part, received) for part, of_part in zip(bucket, pieces, strict=True)]


def _for_every_rank(bucket: list[_Part]) -> tuple[Tensor, list[int]]:
    """Returns what is sent, flat, to each rank its regions of the parts one behind the other, and the elements of
    each."""
    leaving = [part.leaving() for part in bucket]
    together: dict[tuple[int, ...], Tensor] = {}
    sent = []
    for keys in zip(*(part.keys for part in bucket), strict=True):
        if keys not in together:
            pieces = [of_part[key] for of_part, key in zip(leaving, keys, strict=True)]
            together[keys] = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        sent.append(together[keys])
    return torch.cat(sent), [*map(len, sent)]
