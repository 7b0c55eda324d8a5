"""Whole tensors from the shards of all ranks, or what each rank needs of them; many small ones in one collective."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

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
            every rank.
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

    def needed(self, *, by: int, of: int) -> Region:
        """Returns what rank `by` of the sharding needs of the rows that rank `of` holds."""
        assert self.sharding is not None
        assert self.regions is not None
        rows = self.sharding.rows(self.shape[0], of)
        return self.regions[by].among_rows(rows.start, rows.stop)

    def assembled(self, pieces: Sequence[Tensor]) -> Tensor:
        """Puts together what this rank needs, from what came of each rank's rows."""
        assert self.sharding is not None
        starts = [self.sharding.rows(self.shape[0], rank).start for rank in range(len(pieces))]
        return torch.cat([piece for _, piece in sorted(zip(starts, pieces, strict=True), key=itemgetter(0))])


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
    pieces = _exchanged(bucket)
    for index, part in enumerate(bucket):
        yield part.assembled([of_parts[index] for of_parts in pieces])


def _region_alone(part: _Part) -> Tensor:
    if part.sharding is None or part.sharding.num_ranks == 1:
        assert part.regions is not None
        return part.regions[dist.get_rank()].of(_alone(part)).clone()
    return part.assembled([piece for (piece,) in _exchanged([part])])


def _exchanged(bucket: list[_Part]) -> list[list[Tensor]]:
    """Sends every rank what it needs of the rows here. Returns by rank what came of each part: [rows, ...]."""
    sharding = bucket[0].sharding
    assert sharding is not None
    assert sharding.group is not None
    ranks, own = range(sharding.num_ranks), sharding.rank
    leaving = [[part.needed(by=rank, of=own) for part in bucket] for rank in ranks]
    coming = [[part.needed(by=own, of=rank).shape for part in bucket] for rank in ranks]
    sent_sizes = [[region.shape.numel() for region in regions] for regions in leaving]
    sizes = [[shape.numel() for shape in shapes] for shapes in coming]
    sent = torch.empty(sum(map(sum, sent_sizes)), dtype=bucket[0].dtype, device=sharding.device)
    places = iter(sent.split([size for of_parts in sent_sizes for size in of_parts]))
    for regions in leaving:
        for part, region in zip(bucket, regions, strict=True):
            next(places).view(region.shape).copy_(region.of(local_shard(part.tensor)))
    received = send_rows(sent, [*map(sum, sent_sizes)], [*map(sum, sizes)], sharding.group)
    pieces = iter(received.split([size for of_parts in sizes for size in of_parts]))
    return [[next(pieces).view(shape) for shape in shapes] for shapes in coming]
