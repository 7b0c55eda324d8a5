"""A worker group over ranks of one job: rank 0 commands, and works where it is one of them; the others serve.

The same under `shardwise --nproc`, under torchrun, and alone on one process.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.codec import decode, encode
from shardwise.config import ExportError
from shardwise.controller.base import RankSilentError
from shardwise.controller.watchdog import commanded, enter_service, enter_step
from shardwise.fault_plan import plan
from shardwise.types import Connections

_SHUTDOWN = ""
_FOR_AS_LONG_AS_IT_TAKES = timedelta(days=30)


class RankGroup:
    """Rank 0's view of a group of ranks. If it is one of them, its own worker is called directly, in this process.

    Calls from several threads, of this group or of parts of it, wait for each other where they go to the same rank: a
    command and its answer are several messages on one connection, and ranks always work on one call together.
    """

    def __init__(
        self,
        worker: Any,
        control: Connections,
        *,
        timeout_seconds: float,
        timeout_key: str = "engine.collective_timeout_seconds",
        ranks: Sequence[int] | None = None,
        background: Self | None = None,
        locks: Sequence[threading.Lock] | None = None,
    ) -> None:
        """
        Args:
            worker: rank 0's own object whose methods are called; every other rank runs `serve` with its own.
            timeout_seconds: how much later than rank 0 another rank may be done with its part of a call; in a group
                without rank 0, how long it may take.
            timeout_key: the config key that sets it.
            ranks: the members in ascending order; None: every rank.
            background: the group of the same ranks over other connections, with workers of its own.
            locks: one for the connection to each rank, of the groups that share them; None: no other group does.
        """
        self._worker = worker
        self._control = control
        self._timeout = timedelta(seconds=timeout_seconds)
        self._timeout_key = timeout_key
        self.ranks = range(control.size()) if ranks is None else ranks
        self._locks = [threading.Lock() for _ in range(control.size())] if locks is None else locks
        self.size = len(self.ranks)
        self.background = background

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls the method with the same arguments on every rank. Results by rank, a tuple as a list.

        Raises:
            RankSilentError: a rank took longer than it may. ExportError: what every rank raised; all of them serve on.
        """
        message = _command(method, args)
        return self._run(method, [message] * self.size, args)

    def scatter(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        """Calls the method with a shard as its first argument, neighbouring ranks with the same one where there are
        fewer shards than ranks. Results by shard. Raises as `call`."""
        assert self.size % len(shards) == 0, (len(shards), self.size)
        num_sharing = self.size // len(shards)
        encoded = [_command(method, [shard, *args]) for shard in shards]
        messages = [message for message in encoded for _ in range(num_sharing)]
        return self._run(method, messages, (shards[0], *args))[::num_sharing]

    def part(self, first: int, last: int, *, timeout_seconds: float, timeout_key: str) -> Self:
        """The ranks from `first` to before `last`, as a group with a deadline of its own for answers. Calls beside it
        keep theirs."""
        beside = self.background
        return type(self)(
            self._worker,
            self._control,
            timeout_seconds=timeout_seconds,
            timeout_key=timeout_key,
            ranks=self.ranks[first:last],
            locks=self._locks,
            background=None
            if beside is None
            else beside.part(
                first, last, timeout_seconds=beside._timeout.total_seconds(), timeout_key=beside._timeout_key
            ),
        )

    def shutdown(self) -> None:
        """Lets the other ranks return from `serve`, in the background too. Waits for calls that other threads are in;
        those that come later wait for ever, since nobody would answer them.

        Raises:
            RankSilentError: a rank was longer in such a call, or took longer to hear of the end, than it may.
        """
        if self.background is not None:
            self.background.shutdown()
        others = [rank for rank in self.ranks if rank != 0]
        for rank in others:
            if not self._locks[rank].acquire(timeout=self._timeout.total_seconds()):
                raise self._silence(rank, "take", "shutdown")
        self._send("shutdown", dict.fromkeys(others, _command(_SHUTDOWN, [])))

    def _run(self, method: str, messages: Sequence[Tensor], own_args: Sequence[Any]) -> list[Any]:
        # Each rank has its time from the answer of the one before. What rank 0 does itself has no deadline.
        deadline_seconds = 0.0 if self.ranks[0] == 0 else self.size * self._timeout.total_seconds()
        others = {rank: message for rank, message in zip(self.ranks, messages, strict=True) if rank != 0}
        with self._turn(), commanded(method, own_args, deadline_seconds=deadline_seconds):
            self._send(method, others)
            answers = [_answer(self._worker, method, own_args)] if self.ranks[0] == 0 else []
            answers += [decode(message) for message in self._receive(method, list(others))]
        failures = [failure for _, failure in answers if failure is not None]
        if failures:
            raise ExportError(failures[0])
        return [result for result, _ in answers]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Inside this context no other call goes to these ranks."""
        with ExitStack() as stack:
            for rank in self.ranks:  # in the same order in every thread, or two might wait for each other
                stack.enter_context(self._locks[rank])
            yield

    def _send(self, method: str, messages: Mapping[int, Tensor]) -> None:
        """Sends every rank its message, to all at once: a rank that is late keeps no other waiting."""
        sending = {rank: _begin_to_send(message, rank, self._control) for rank, message in messages.items()}
        for rank, works in sending.items():
            for work in works:
                self._wait(work, rank, "take", method)

    def _receive(self, method: str, ranks: Sequence[int]) -> Iterator[Tensor]:
        """Receives a message of each rank, from all at once. They come in the order of the ranks, and each is let go
        before the next: a message and what it says are not held twice, but for one of them."""
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in ranks}
        arriving = {rank: self._control.recv([size], rank, 0) for rank, size in sizes.items()}
        messages: deque[tuple[int, Tensor, dist.Work]] = deque()
        for rank, work in arriving.items():
            self._wait(work, rank, "answer", method)
            message = torch.empty(int(sizes[rank]), dtype=torch.uint8)
            messages.append((rank, message, self._control.recv([message], rank, 0)))
        while messages:
            rank, message, work = messages.popleft()
            self._wait(work, rank, "answer", method)
            yield message

    def _wait(self, work: dist.Work, rank: int, verb: str, method: str) -> None:
        """Turns the transport's timeout, which names nobody, into an error that names the rank and the call."""
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            raise self._silence(rank, verb, method) from error

    def _silence(self, rank: int, verb: str, method: str) -> RankSilentError:
        return RankSilentError(
            f"rank {rank} did not {verb} `{method}` within {self._timeout.total_seconds():.0f} s "
            f"({self._timeout_key}); it hangs, or if it is only slow, raise that"
        )


def _command(method: str, args: Sequence[Any]) -> Tensor:
    """Encodes a command for `serve`, with the step that it belongs to, which only rank 0 counts."""
    return encode([plan().step, method, args])


def serve(worker: Any, control: Connections, *, follows_steps: bool = True) -> None:
    """Runs on every rank but 0. Consumes commands, sends results; waits for rank 0 as long as it is alive; returns at
    `shutdown`.

    Args:
        follows_steps: this process does nothing else, and is in the step of its newest command.

    An exception leaves the loop and ends the process: a rank that could not do its part cannot go on in step. Only an
    ExportError goes to rank 0 instead: every rank raises it or none does, so they are in step after it.
    """
    if follows_steps:
        enter_service()
    while True:
        step, method, args = decode(_next_command(control))
        if method == _SHUTDOWN:
            return
        if follows_steps and step != plan().step:
            enter_step(step)
        with commanded(method, args):
            answer = encode(_answer(worker, method, args))
        for work in _begin_to_send(answer, 0, control):
            work.wait(_FOR_AS_LONG_AS_IT_TAKES)


def _answer(worker: Any, method: str, args: Sequence[Any]) -> tuple[Any, str | None]:
    """Returns the result, and the message of the ExportError if it ended in one."""
    try:
        return getattr(worker, method)(*args), None
    except ExportError as error:
        return None, str(error)


def serve_in_background(worker: Any, control: Connections, on_failure: Callable[[Exception], None]) -> threading.Thread:
    """`serve` in a thread, which ends with it; `on_failure` is called there with what ended it otherwise. The step is
    that of the main thread."""

    def run() -> None:
        try:
            serve(worker, control, follows_steps=False)
        except Exception as error:
            on_failure(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _begin_to_send(message: Tensor, rank: int, group: Connections) -> list[dist.Work]:
    return [group.send([part], rank, 0) for part in (torch.tensor([message.numel()]), message)]


def _next_command(control: Connections) -> Tensor:
    size = torch.zeros(1, dtype=torch.int64)
    control.recv([size], 0, 0).wait(_FOR_AS_LONG_AS_IT_TAKES)
    message = torch.empty(int(size), dtype=torch.uint8)
    control.recv([message], 0, 0).wait(_FOR_AS_LONG_AS_IT_TAKES)
    return message
