"""A worker group over the ranks of one job: rank 0 commands and works, the others serve.

The same under `shardwise --nproc`, under torchrun, and alone on one process.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.controller.base import RankSilentError
from shardwise.controller.codec import decode, encode

_SHUTDOWN = ""
_FOR_AS_LONG_AS_IT_TAKES = timedelta(days=30)


class RankGroup:
    """Rank 0's view of the group; its own worker is called directly, in this process."""

    def __init__(self, worker: Any, control: dist.ProcessGroup, *, timeout_seconds: float) -> None:
        """
        Args:
            worker: the object whose methods are called; every other rank runs `serve` with its own.
            timeout_seconds: how much later than rank 0 another rank may be done with its part of a call.
        """
        self._worker = worker
        self._control = control
        self._timeout = timedelta(seconds=timeout_seconds)
        self.size = dist.get_world_size(control)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls the method with the same arguments on every rank. Results by rank, a tuple as a list.

        Raises:
            RankSilentError: a rank took longer than it may.
        """
        message = encode([method, args])
        return self._run(method, [message] * self.size, args)

    def scatter(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        """Calls the method with a shard as its first argument, neighbouring ranks with the same one where there are
        fewer shards than ranks. Results by shard. Raises as `call`."""
        assert self.size % len(shards) == 0, (len(shards), self.size)
        num_sharing = self.size // len(shards)
        messages = [encode([method, [shard, *args]]) for shard in shards for _ in range(num_sharing)]
        return self._run(method, messages, (shards[0], *args))[::num_sharing]

    def shutdown(self) -> None:
        """Lets the other ranks return from `serve`."""
        for rank in range(1, self.size):
            _send(encode([_SHUTDOWN, []]), rank, self._control, self._timeout)

    def _run(self, method: str, messages: Sequence[Tensor], own_args: Sequence[Any]) -> list[Any]:
        with self._watch("take", method) as rank_in_turn:
            for rank in range(1, self.size):
                rank_in_turn[0] = rank
                _send(messages[rank], rank, self._control, self._timeout)
        results = [getattr(self._worker, method)(*own_args)]
        with self._watch("answer", method) as rank_in_turn:
            for rank in range(1, self.size):
                rank_in_turn[0] = rank
                results.append(decode(_receive(rank, self._control, self._timeout)))
        return results

    @contextmanager
    def _watch(self, verb: str, method: str) -> Iterator[list[int]]:
        """Turns the transport's timeout, which names nobody, into an error that names the rank and the call."""
        rank_in_turn = [0]
        try:
            yield rank_in_turn
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            raise RankSilentError(
                f"rank {rank_in_turn[0]} did not {verb} `{method}` within {self._timeout.total_seconds():.0f} s "
                "(engine.collective_timeout_seconds); it hangs, or its machine is far slower than that of rank 0"
            ) from error


def serve(worker: Any, control: dist.ProcessGroup) -> None:
    """Runs on every rank but 0. Consumes commands, sends results; waits for rank 0 as long as it is alive; returns at
    `shutdown`.

    An exception leaves the loop and ends the process: a rank that could not do its part cannot go on in step.
    """
    while True:
        method, args = decode(_receive(0, control, _FOR_AS_LONG_AS_IT_TAKES))
        if method == _SHUTDOWN:
            return
        _send(encode(getattr(worker, method)(*args)), 0, control, _FOR_AS_LONG_AS_IT_TAKES)


def _send(message: Tensor, rank: int, group: dist.ProcessGroup, timeout: timedelta) -> None:
    for part in (torch.tensor([message.numel()]), message):
        work = dist.isend(part, rank, group)
        assert work is not None
        work.wait(timeout)


def _receive(rank: int, group: dist.ProcessGroup, timeout: timedelta) -> Tensor:
    size = torch.zeros(1, dtype=torch.int64)
    _receive_into(size, rank, group, timeout)
    message = torch.empty(int(size), dtype=torch.uint8)
    _receive_into(message, rank, group, timeout)
    return message


def _receive_into(target: Tensor, rank: int, group: dist.ProcessGroup, timeout: timedelta) -> None:
    work = dist.irecv(target, rank, group)
    assert work is not None
    work.wait(timeout)
