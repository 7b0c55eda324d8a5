"""Which part of a parameter this rank holds, and how the rows of one are spread over ranks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its storage; a plain tensor is whole. Call it without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def first_numbers(tensors: Iterable[Tensor]) -> Tensor:
    """[n], this rank's part of the first of these of which it has one, sharing its storage; empty where there is
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
    """Whether it is whole, or sharded along dim 0 over one axis, as by fully_shard."""
    sharded = [place for place in tensor.placements if isinstance(place, Shard)] if isinstance(tensor, DTensor) else []
    return sharded in ([], [Shard(0)])


@dataclass(frozen=True, slots=True)
class RowSharding:
    """The ranks that share the rows of a parameter, in the order of their rows. HSDP replicas have groups of their own.

    Example: 7 rows on 4 ranks are 2, 2, 2, 1; 5 rows are 2, 2, 1, 0.
    """

    group: dist.ProcessGroup | None
    """None: the parameter is whole on this rank."""
    num_ranks: int
    rank: int
    device: torch.device
    """Where collectives of the group take their tensors; shards themselves may be in host memory (CPU offload)."""

    @classmethod
    def of(cls, parameter: Tensor) -> "RowSharding":
        """Groups compare equal for parameters on the same mesh, so shardings do too."""
        if not isinstance(parameter, DTensor):
            return cls(None, 1, 0, parameter.device)
        mesh = parameter.device_mesh
        axes = [axis for axis, placement in enumerate(parameter.placements) if isinstance(placement, Shard)]
        if not axes:
            return cls(None, 1, 0, local_shard(parameter).device)
        assert is_by_rows(parameter), f"{parameter.placements}: expected dim 0 sharded over one axis, as by fully_shard"
        device = torch.empty(0, device=mesh.device_type).device
        return cls(mesh.get_group(axes[0]), mesh.size(axes[0]), mesh.get_local_rank(axes[0]), device)

    def num_rows(self, total_rows: int, rank: int) -> int:
        """Rows that `rank` holds of `total_rows`: equal chunks, the last ones smaller or empty (torch.chunk)."""
        chunk = -(-total_rows // self.num_ranks)
        return max(0, min(chunk, total_rows - rank * chunk))

    def first_element(self, shape: torch.Size) -> int:
        """The place of this rank's first element in the flattened whole of this shape."""
        num_rows_before = sum(self.num_rows(shape[0], rank) for rank in range(self.rank))
        return num_rows_before * math.prod(shape[1:])
