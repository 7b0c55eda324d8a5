"""Host memory without a name, shared between processes: nothing is left behind, whichever of them dies. Linux only."""

import mmap
import os
import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 64


def create_memory(num_bytes: int = 0) -> int:
    """Returns a descriptor, which can be passed to other processes; `os.ftruncate` changes the size."""
    descriptor = os.memfd_create("shardwise-weights")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def mapped(descriptor: int) -> Tensor:
    """Maps all of the memory as [num_bytes] uint8; the memory lives as long as the tensor or a descriptor does."""
    return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)


class SharedTensors:
    """Tensors that this process computes with, in memory that another process may write to."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Moves the tensors into shared memory in place: whoever holds one finds its values there. Each is given once.
        Tensors on other devices and tensors that are not contiguous stay where they are."""
        moved = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.is_contiguous()]
        offsets, num_bytes = [], 0
        for tensor in moved:
            offsets.append(num_bytes)
            num_bytes += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.descriptor = create_memory(max(num_bytes, 1))
        weakref.finalize(self, os.close, self.descriptor)
        self._memory = mapped(self.descriptor)
        for tensor, offset in zip(moved, offsets, strict=True):
            place = self._memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor.data = place.copy_(tensor.detach())

    def places(self, named: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        """Name -> (offset, number of bytes), for those of the tensors that lie in the memory."""
        begin, end = self._memory.data_ptr(), self._memory.data_ptr() + self._memory.nbytes
        return {
            name: (tensor.data_ptr() - begin, tensor.nbytes)
            for name, tensor in named.items()
            if not tensor.is_meta and begin <= tensor.data_ptr() < end and tensor.is_contiguous()
        }
