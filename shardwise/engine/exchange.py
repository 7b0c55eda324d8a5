"""Exchanges between ranks: rows of tensors, and plain data, as JSON because torch's object collectives unpickle what
they receive."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def send_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Collective over `group`. Sends rows to the ranks that need them; their gradients take the way back.

    Args:
        rows: [n, ...]; the first `sent[0]` go to rank 0 of the group, the next `sent[1]` to rank 1, and so on.
        received: how many come from each rank.
    Returns:
        [r, ...], the rows that arrive, in the order of the ranks.
    """
    arrived: Tensor = _Travel.apply(rows, sent, received, group)
    return arrived


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _travel(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _travel(grad.contiguous(), ctx.received, ctx.sent, ctx.group), None, None, None


def _travel(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows, received, sent, group=group)
    return arrived


def all_gather_json(value: Any) -> list[Any]:
    """Collective over all ranks. Returns what every rank gave, by rank; a tuple comes back as a list.

    Every rank receives the longest rank's number of bytes from each.
    """
    padded, sizes = _encoded(value)
    return _decoded(_all_gather(padded), sizes)


def gather_json(value: Any) -> list[Any]:
    """Collective over all ranks. Returns on rank 0 what `all_gather_json` returns; an empty list on the others, which
    receive nothing but sizes."""
    padded, sizes = _encoded(value)
    received = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else []
    dist.gather(padded, received, dst=0)
    return _decoded(received, sizes[: len(received)])


def _encoded(value: Any) -> tuple[Tensor, list[int]]:
    """Collective. Returns the value as bytes, padded to the longest rank's, and every rank's number of bytes."""
    encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in _all_gather(torch.tensor([encoded.numel()]))]
    return torch.nn.functional.pad(encoded, (0, max(sizes) - encoded.numel())), sizes


def _decoded(buffers: list[Tensor], sizes: list[int]) -> list[Any]:
    return [json.loads(buffer[:size].numpy().tobytes()) for buffer, size in zip(buffers, sizes, strict=True)]


def _all_gather(tensor: Tensor) -> list[Tensor]:
    """Gathers tensors of one shape on the host from all ranks, by rank."""
    received = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(received, tensor)
    return received
