"""Whole tensors from the shards of all ranks, many small ones in one collective."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.engine.conversions import ExportBlock
from shardwise.engine.shards import RowSharding, is_by_rows, local_shard
from shardwise.ops import all_gather_flat

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
    bucket: list[_Part] = []
    for tensor, dtype in tensors:
        part = _Part(tensor.detach(), dtype, RowSharding.of(tensor) if is_by_rows(tensor) else None)
        if bucket and not part.fits(bucket, bucket_bytes):
            yield from _gather(bucket)
            bucket = []
        bucket.append(part)
    if bucket:
        yield from _gather(bucket)


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
            and self.num_bytes + sum(part.num_bytes for part in bucket) <= bucket_bytes
        )


def _gather(bucket: list[_Part]) -> Iterator[Tensor]:
    """Yields the whole tensors of parts of one sharding and dtype. Nothing is kept of a part that is alone."""
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
