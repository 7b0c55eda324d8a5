"""Hashes of the bytes that an engine computes with, which prove that it has the weights that were sent."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from shardwise.ops import on_current_stream

_MAX_THREADS = 4
"""One thread hashes 20 GB/s; more than a few exceed what memory delivers."""
_WAITING_BYTES = 1 << 26
"""Bytes of tensors that may be queued beyond one for each thread, so that no thread idles while another one hashes a
larger tensor."""


def checksum(tensor: Tensor) -> int:
    """xxh3 of the tensor's bytes in memory order. Other threads can run meanwhile."""
    return xxhash.xxh3_64_intdigest(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)


def checksums(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, int | None]]:
    """Yields (name, checksum), hashing a few tensors at a time, or many small ones. The checksum is None for a tensor
    on the meta device, which cannot be read."""
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    waiting: deque[_Waiting] = deque()
    num_bytes = 0
    with ThreadPoolExecutor(num_threads) as pool:
        for name, tensor in weights:
            digest = None if tensor.is_meta else pool.submit(on_current_stream(checksum, tensor.device), tensor)
            waiting.append(_Waiting(name, 0 if tensor.is_meta else tensor.nbytes, digest))
            num_bytes += waiting[-1].num_bytes
            while len(waiting) > num_threads and num_bytes > _WAITING_BYTES:
                num_bytes -= waiting[0].num_bytes
                yield waiting.popleft().finished()
        while waiting:
            yield waiting.popleft().finished()


class _Waiting(NamedTuple):
    name: str
    num_bytes: int
    digest: Future[int] | None

    def finished(self) -> tuple[str, int | None]:
        return self.name, None if self.digest is None else self.digest.result()
