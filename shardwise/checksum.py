"""What proves that weights are those that were sent: hashes of the bytes that an engine computes with."""

from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor


def checksum(tensor: Tensor) -> int:
    """xxh3 of the tensor's bytes in memory order."""
    return xxhash.xxh3_64_intdigest(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)


def checksums(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, int | None]]:
    """By name. None for those on the meta device, which cannot be read."""
    return ((name, None if tensor.is_meta else checksum(tensor)) for name, tensor in weights)
