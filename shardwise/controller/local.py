"""A worker group over the ranks of one job: rank 0 commands and works, the others serve.

The same under `shardwise --nproc`, under torchrun, and alone on one process.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.controller.codec import decode, encode

_SHUTDOWN = ""


class RankGroup:
    """Rank 0's view of the group; its own worker is called directly, in this process."""

    def __init__(self, worker: Any, control: dist.ProcessGroup) -> None:
        """`worker`: the object whose methods are called; every other rank runs `serve` with its own."""
        self._worker = worker
        self._control = control
        self.size = dist.get_world_size(control)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls the method with the same arguments on every rank. Results by rank, a tuple as a list."""
        message = encode([method, args])
        for rank in range(1, self.size):
            _send(message, rank, self._control)
        return self._collect(getattr(self._worker, method)(*args))

    def scatter(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        """Calls the method with shards[rank] as its first argument. Results by rank."""
        assert len(shards) == self.size, (len(shards), self.size)
        for rank in range(1, self.size):
            _send(encode([method, [shards[rank], *args]]), rank, self._control)
        return self._collect(getattr(self._worker, method)(shards[0], *args))

    def shutdown(self) -> None:
        """Lets the other ranks return from `serve`."""
        message = encode([_SHUTDOWN, []])
        for rank in range(1, self.size):
            _send(message, rank, self._control)

    def _collect(self, own: Any) -> list[Any]:
        return [own, *(decode(_receive(rank, self._control)) for rank in range(1, self.size))]


def serve(worker: Any, control: dist.ProcessGroup) -> None:
    """Runs on every rank but 0. Consumes commands, sends results; waits for rank 0; returns at `shutdown`.

    An exception leaves the loop and ends the process: a rank that could not do its part cannot go on in step.
    """
    while True:
        method, args = decode(_receive(0, control))
        if method == _SHUTDOWN:
            return
        _send(encode(getattr(worker, method)(*args)), 0, control)


def _send(message: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    dist.send(torch.tensor([message.numel()]), rank, group)
    dist.send(message, rank, group)


def _receive(rank: int, group: dist.ProcessGroup) -> Tensor:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank, group)
    message = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(message, rank, group)
    return message
