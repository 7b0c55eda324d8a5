"""Plain data between all ranks, as JSON: torch's object collectives unpickle what they receive."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_json(value: Any) -> list[Any]:
    """Collective over all ranks. What every rank gave, by rank; a tuple comes back as a list.

    Every rank receives the longest rank's number of bytes from each.
    """
    encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in _all_gather(torch.tensor([encoded.numel()]))]
    padded = torch.nn.functional.pad(encoded, (0, max(sizes) - encoded.numel()))
    gathered = zip(_all_gather(padded), sizes, strict=True)
    return [json.loads(buffer[:size].numpy().tobytes()) for buffer, size in gathered]


def _all_gather(tensor: Tensor) -> list[Tensor]:
    """Of tensors of one shape on the host."""
    received = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(received, tensor)
    return received
