"""Which part of a parameter this rank holds, and how the rows of one are spread over ranks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its storage; a plain tensor is whole. Call it without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def first_numbers(tensors: Iterable[Tensor]) -> Tensor:
    """Returns [n], this rank's part of the first tensor that it holds a part of, sharing its storage; empty if there is
    none."""
    parts = (local_shard(tensor).detach().view(-1) for tensor in tensors)
    return next((part for part in parts if len(part)), torch.empty(0))


def local_box(tensor: Tensor) -> list[slice]:
    """The part of the full tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return [slice(0, size) for size in tensor.shape]
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [slice(start, start + size) for start, size in zip(offset, shape, strict=True)]


def is_by_rows(tensor: Tensor) -> bool:
    """Whether it is whole, or sharded along dim 0: over one axis, as by fully_shard, or over two, as fully_shard does
    to experts whose rows are split already."""
    sharded = [place for place in tensor.placements if is_sharded(place)] if isinstance(tensor, DTensor) else []
    return len(sharded) <= 2 and all(cast(Any, place).dim == 0 for place in sharded)


def num_rows_of(shape: Sequence[int]) -> int:
    """The length of dim 0; a tensor of no dimensions is one row."""
    return shape[0] if shape else 1


def rows_by_replica(tensor: Tensor) -> list[list[tuple[range, int]]]:
    """Returns, for each copy of a tensor that is whole or sharded along dim 0, the rows of its shards and the rank that
    holds each, in the order of the rows; without shards that have none."""
    num_rows = num_rows_of(tensor.shape)
    if not isinstance(tensor, DTensor):
        return [[(range(num_rows), rank)] if num_rows else [] for rank in range(dist.get_world_size())]
    sharding = RowSharding.of(tensor)
    sharded = [axis for axis, place in enumerate(tensor.placements) if is_sharded(place)]
    replicated = [axis for axis in range(tensor.device_mesh.ndim) if axis not in sharded]
    ranks = tensor.device_mesh.mesh.permute(*replicated, *sharded).reshape(-1, sharding.num_ranks)
    rows = [sharding.rows(num_rows, number) for number in range(sharding.num_ranks)]
    order = sorted((number for number in range(len(rows)) if rows[number]), key=lambda number: rows[number].start)
    return [[(rows[number], replica[number]) for number in order] for replica in ranks.tolist()]


def is_sharded(place: Placement) -> bool:
    """Whether a placement shards along its axis of the mesh. In some releases fully_shard gives a split tensor a
    placement of another class than Shard."""
    return not isinstance(place, Replicate | Partial)


@dataclass(frozen=True, slots=True)
class RowSharding:
    """The ranks that share the rows of a parameter. HSDP replicas have groups of their own.

    Example: 7 rows on 4 ranks are 2, 2, 2, 1; 5 rows are 2, 2, 1, 0. In 2 parts, 6 rows on 4 ranks are rows 0-1, 3-4,
    2, 5: ranks 0 and 2 share the first part.
    """

    group: dist.ProcessGroup | None
    """None: the parameter is whole on this rank."""
    num_ranks: int
    rank: int
    device: torch.device
    """The device on which collectives of the group take their tensors; shards themselves may be in host memory (CPU
    offload)."""
    num_parts: int = 1
    """Number of equal parts of the rows. Rank r shares part r % num_parts with the other ranks of that part, in their
    order."""

    @classmethod
    def of(cls, parameter: Tensor) -> "RowSharding":
        """Returns the sharding of a parameter. Those of parameters on the same mesh compare equal, as their groups
        do."""
        if not isinstance(parameter, DTensor):
            return cls(None, 1, 0, parameter.device)
        mesh = parameter.device_mesh
        axes = [axis for axis, placement in enumerate(parameter.placements) if is_sharded(placement)]
        if not axes:
            return cls(None, 1, 0, local_shard(parameter).device)
        assert is_by_rows(parameter), f"{parameter.placements}: expected dim 0 sharded, as by fully_shard"
        device = torch.empty(0, device=mesh.device_type).device
        if len(axes) == 1:
            return cls(mesh.get_group(axes[0]), mesh.size(axes[0]), mesh.get_local_rank(axes[0]), device)
        ranks = mesh._get_root_mesh()  # both axes are parts of its last one
        return cls(ranks.get_group(-1), ranks.size(-1), ranks.get_local_rank(-1), device, mesh.size(axes[1]))

    def rows(self, total_rows: int, rank: int) -> range:
        """Returns the rows that `rank` holds of `total_rows`: one of the equal chunks of its part, the last of which
        are smaller or empty (torch.chunk)."""
        return _rows(total_rows, rank, self.num_ranks, self.num_parts)

    def bounds(self, total_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns of the `rows` of every rank the first one, and the one after the last."""
        return _bounds(total_rows, self.num_ranks, self.num_parts)

    def num_rows(self, total_rows: int, rank: int) -> int:
        """How many rows `rank` holds of `total_rows`."""
        return len(self.rows(total_rows, rank))

    def first_element(self, shape: torch.Size) -> int:
        """The place of this rank's first element in the flattened whole of this shape."""
        return self.rows(shape[0], self.rank).start * math.prod(shape[1:]) if shape else 0

    def assembled(self, by_rank: Tensor, shape: torch.Size) -> Tensor:
        """Puts a tensor of `shape` together from [num_ranks, slot], what the ranks hold, each padded to as much as the
        rank with the most. The result shares the memory of `by_rank` if that is contiguous and in order."""
        by_part = by_rank.unflatten(0, (-1, self.num_parts)).transpose(0, 1).contiguous().flatten(1)
        if self.num_parts > 1:  # the slots of a part's last ranks end in padding
            by_part = by_part[:, : shape.numel() // self.num_parts].contiguous()
        return by_part.view(-1)[: shape.numel()].view(shape)


def _rows(total_rows: int, rank: int, num_ranks: int, num_parts: int) -> range:
    part_rows, num_sharing = total_rows // num_parts, num_ranks // num_parts
    chunk = -(-part_rows // num_sharing)
    place, part = divmod(rank, num_parts)
    start, stop = (part * part_rows + min(part_rows, chunk * n) for n in (place, place + 1))
    return range(start, stop)


@lru_cache(maxsize=256)
def _bounds(total_rows: int, num_ranks: int, num_parts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows = [_rows(total_rows, rank, num_ranks, num_parts) for rank in range(num_ranks)]
    return tuple(of_rank.start for of_rank in rows), tuple(of_rank.stop for of_rank in rows)
