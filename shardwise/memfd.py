"""Host memory without a name that processes share: nothing is left behind, whoever dies. Linux only."""

import mmap
import os

import torch
from torch import Tensor


def create_memory(num_bytes: int = 0) -> int:
    """Returns a descriptor, which other processes may be passed; `os.ftruncate` changes the size."""
    descriptor = os.memfd_create("shardwise-weights")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def mapped(descriptor: int) -> Tensor:
    """[num_bytes] uint8, all of the memory, which lives as long as the tensor or a descriptor."""
    return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)
