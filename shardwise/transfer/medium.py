"""The transport of a weight sync: the protocol of a medium (one sender, many receivers), and their rendezvous."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.config import PeerLostError
from shardwise.memfd import SharedTensors
from shardwise.transfer.receipt import WeightSyncError

SENDER = 0
"""The end that sends; all others receive."""

MEASUREMENT = -1
"""The version of bytes that travel only to see how fast they do: a medium that keeps versions keeps none of them."""


Place = Callable[[str], Sequence[Tensor | None]]
"""Maps a bucket's header to the destinations of its blocks, [num_bytes] uint8 on the medium's device; None: no
preference. Blocks beyond those named have none."""


def nowhere(_header: str) -> Sequence[Tensor | None]:
    """The `Place` of a caller without destinations."""
    return ()


def name_of(rank: int) -> str:
    """The name of an end in errors."""
    return "the sender" if rank == SENDER else f"receiver {rank}"


class MediumError(WeightSyncError):
    """The medium itself failed. It carries nothing any more; join a new one."""


class EndLostError(MediumError, PeerLostError):
    """An end is silent or gone."""


class Medium(Protocol):
    """One end of a pipe of buckets from end 0 to all others. Whatever waits has a deadline, then raises MediumError.

    A sync on it: all ends `meet`, end 0 sends bucket after bucket, all ends `meet` again and compare their receipts.
    """

    large_bytes: int
    """From this size on a tensor is better a block of its own, sent from where it lies, than copied beside others."""

    @property
    def device(self) -> torch.device:
        """Where buckets lie."""

    def meet(self, phase: str, message: str) -> list[str]:
        """Gives every end's message to every end, in the order of the ends. `phase` is what errors call the wait."""

    def expose(self, memory: SharedTensors, places: Mapping[str, tuple[int, int]]) -> None:
        """Called at a receiver before the meeting that begins a sync: from then on the sender may, if the medium can,
        write what it sends straight to these places of the memory (name -> offset and number of bytes)."""

    def exposed(self) -> Mapping[str, Tensor]:
        """Called at the sender after that meeting: what the only receiver has exposed, name -> [num_bytes] uint8."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Returns [num_bytes] uint8 to fill for the next bucket, while the one before is on its way."""

    def send(self, header: str, packed: Tensor, laid: Sequence[Tensor] = ()) -> None:
        """Begins to send a bucket.

        Args:
            header: has at most MAX_HEADER_BYTES.
            packed: the bucket's first block, the front of the last `buffer`.
            laid: further blocks, [num_bytes] uint8 each, of at least `large_bytes`. They lie in memory of the caller's,
                which has to keep its values until `meet` returns.
        """

    def receive(self, place: Place = nowhere) -> tuple[str, list[Tensor]]:
        """Returns the next bucket's header and blocks, valid until the next call. The bucket after it is on its way, to
        where `place` says if the medium can."""

    def break_off(self, message: str) -> list[str | None]:
        """Called after a MediumError: makes the other ends fail too, tells them why, and returns what they said, None
        for those that said nothing for a few seconds."""

    def close(self) -> None:
        """Frees connections and memory."""


class Rendezvous:
    """Exchanges short messages between the ends of a medium through a torch Store. Errors name the ends that missed the
    deadline."""

    GRACE = timedelta(seconds=2)

    def __init__(self, store: dist.Store, rank: int, size: int, *, timeout: timedelta) -> None:
        assert 0 <= rank < size, (rank, size)
        if size < 2:
            raise ValueError(f"a medium has a sender and at least one receiver, but size={size}; give 2 or more")
        self._store = dist.PrefixStore("rendezvous", store)
        self._rank, self._size, self._timeout = rank, size, timeout
        self._count = 0

    def meet(self, phase: str, message: str) -> list[str]:
        """See Medium.meet."""
        answers = self._exchange(f"{self._count}", message, self._timeout, phase)
        silent = [rank for rank, answer in enumerate(answers) if answer is None]
        if silent:
            names = " and ".join(name_of(rank) for rank in silent)
            raise EndLostError(f"{phase}: waited {self._timeout.total_seconds():g} s for {names}")
        # An end that has come to this meeting has read the messages of the one before.
        if self._count:
            self._store.delete_key(f"{self._count - 1}/{self._rank}")
        self._count += 1
        return [answer for answer in answers if answer is not None]

    def break_off(self, message: str) -> list[str | None]:
        """See Medium.break_off."""
        try:
            return self._exchange("broken", message, min(self.GRACE, self._timeout), "breaking off")
        except MediumError:
            return [None] * self._size

    def _exchange(self, meeting: str, message: str, timeout: timedelta, phase: str) -> list[str | None]:
        deadline = time.monotonic() + timeout.total_seconds()
        keys = [f"{meeting}/{rank}" for rank in range(self._size)]
        try:
            self._store.set(keys[self._rank], message)
            # Always less than whole seconds, of which a FileStore waits one more.
            remaining = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            try:
                self._store.wait(keys, remaining)
            except RuntimeError:  # the deadline, or the store is gone, which `check` tells
                return [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]
            return [answer.decode() for answer in self._store.multi_get(keys)]
        except RuntimeError as error:
            raise EndLostError(f"{phase}: the store where the ends meet is gone ({error})") from error
