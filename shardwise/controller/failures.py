"""Why a job failed: finds the one cause in the notes that its ranks leave and in how they ended."""

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from shardwise.config import EngineLostError, JudgeLostError, PeerLostError, UserError, as_user_error, in_one_line
from shardwise.controller.base import RankSilentError, RankStalledError
from shardwise.controller.exit_codes import FAILURE, USER_ERROR, code_of_signal
from shardwise.controller.memory import MemoryHistory
from shardwise.controller.signals import STOP_SIGNALS
from shardwise.controller.watchdog import JOB_FOLDER_VARIABLE, wait_until_collected

_TIMED_OUT = re.compile(r"timed out|timeout|waited \S+ s for", re.IGNORECASE)
_LOST_PEER = re.compile(rf"peer|Connection|{_TIMED_OUT.pattern}", re.IGNORECASE)
"""Matches what torch's transports say when a rank is gone or hangs."""
_NO_HOST_MEMORY = re.compile(r"can't allocate memory|not enough memory", re.IGNORECASE)
"""Matches what torch's allocator says when the host has no memory left."""
_VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank says of its own failure."""

    rank: int
    time: float
    """time.monotonic() of the failure: a clock that all processes of a machine share and nobody sets."""
    message: str
    traceback: str
    is_user_error: bool
    is_lost_peer: bool
    """Another rank is gone or hangs, so this failure is not the cause."""
    is_timeout: bool
    """The other rank hangs."""
    is_stalled: bool = False
    """A rank makes no progress: this one, or rank 0, for which it waits."""
    lacks_host_memory: bool = False
    """It asked for more memory than the host had."""
    is_shared: bool = False
    """Every rank reports the same, so that one report is enough."""

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Self:
        """Makes the note for the error that ends this rank."""
        error = as_user_error(error)
        message, is_user_error = str(error) or type(error).__name__, isinstance(error, UserError)
        if isinstance(error, SystemExit):  # from code that this rank called
            message = f"something called sys.exit({error.code!r}), which ends no run; raise an error instead"
        is_silent, is_stalled = isinstance(error, RankSilentError), isinstance(error, RankStalledError)
        tells_all = is_silent or is_stalled or isinstance(error, PeerLostError | JudgeLostError)
        lacks_host_memory = _lacks_host_memory(error)
        if lacks_host_memory or type(error).__name__ == "OutOfMemoryError":  # torch's error for a device
            message = f"out of memory: {message}; smaller micro-batches, activation checkpointing and offload need less"
        return cls(
            rank=rank,
            time=time.monotonic(),
            message=message,
            traceback="" if tells_all else "".join(traceback.format_exception(error)),
            is_user_error=is_user_error,
            is_lost_peer=is_lost_peer(error),
            is_timeout=is_silent or (is_lost_peer(error) and bool(_TIMED_OUT.search(message))),
            is_stalled=is_stalled,
            lacks_host_memory=lacks_host_memory,
            is_shared=isinstance(error, UserError) and error.is_shared,
        )

    def leave(self, folder: Path) -> None:
        """Writes the note into `folder`, for `read_notes`."""
        partial = folder / f"failure-{self.rank}.partial"  # a rank may be ended while it writes
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(partial.with_suffix(".json"))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a group of ranks ended."""

    message: str
    code: int = FAILURE
    traceback: str = ""
    may_pass: bool = True
    """Whether the same command may succeed: not after a mistake of the user's, nor after a signal to stop."""

    def print(self) -> None:
        """Prints it on stderr, the message last."""
        print(f"{self.traceback}error: {self.message}", file=sys.stderr)

    def end_process(self) -> None:
        """Prints it and ends this process at once, though its main thread is waiting."""
        self.print()
        sys.stderr.flush()
        os._exit(self.code)


def is_lost_peer(error: BaseException) -> bool:
    """Returns whether the error only tells that another rank is gone or hangs. torch's transports raise RuntimeErrors
    for that; errors of other types come from what this rank did itself, even if they mention connections."""
    if isinstance(error, RankSilentError | PeerLostError):
        return True
    if isinstance(error, UserError | EngineLostError | RankStalledError) or not isinstance(error, RuntimeError):
        return False
    return bool(_LOST_PEER.search(str(error)))


def _lacks_host_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(_NO_HOST_MEMORY.search(str(error)))
    )


def note_failure(error: BaseException, rank: int) -> int:
    """Reports the error that ends this rank: writes a note for the launcher, or without one prints the reason; a reason
    that all ranks share is printed on rank 0 alone.

    Returns:
        The exit code.
    """
    note, folder = Note.of(error, rank), os.environ.get(JOB_FOLDER_VARIABLE)
    if folder is not None:
        note.leave(Path(folder))
        if note.is_timeout or note.is_stalled:
            wait_until_collected(Path(folder))
    elif note.is_lost_peer and rank > 0:
        print(f"rank {rank}: another rank ended or hangs; its own message tells why", file=sys.stderr)
    elif not note.is_shared or rank == 0:
        where = f"rank {rank}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not note.is_shared else ""
        print(("" if note.is_user_error else note.traceback) + f"error: {where}{note.message}", file=sys.stderr)
    return USER_ERROR if note.is_user_error else FAILURE


def read_notes(folder: Path) -> list[Note]:
    """Reads the notes of the ranks that have failed so far, the likeliest cause first."""
    notes = [Note(**json.loads(path.read_text())) for path in folder.glob("failure-*.json")]
    return sorted(notes, key=lambda note: (note.is_lost_peer, note.time))


def explain(
    codes: Mapping[int, int],
    notes: Sequence[Note],
    places: Mapping[int, str],
    states: Mapping[int, str],
    *,
    idle: Container[int] = (),
    num_killed: int,
    memory: MemoryHistory | None = None,
) -> Failure:
    """Returns the cause. A failing rank takes its peers with it, so what these say about a lost peer counts least.

    Args:
        codes: exit codes of the ranks that failed, from before the other ranks were ended, so that a signal among them
            did not come from the launcher.
        notes: from `read_notes`.
        places: for every rank, what it was doing, or "".
        states: for ranks that did not answer, why, as in "is stopped".
        idle: ranks that wait to be told what to do: they do not hang.
        num_killed: processes on this machine that the kernel has killed for lack of memory since the job started.
        memory: how much memory the ranks held; None if it was not sampled.
    """
    first = notes[0] if notes else None
    heard = {note.rank for note in notes}
    by_signal = [rank for rank, code in codes.items() if code < 0 and rank not in heard]  # others were on their way out
    if by_signal and (first is None or first.is_lost_peer):
        rank = by_signal[0]
        held = "" if memory is None or num_killed == 0 else memory.told(rank)
        return _ended_by_signal(rank, -codes[rank], places[rank], num_killed, held)
    if first is None:
        rank, code = next(iter(codes.items()))
        return Failure(f"rank {rank} exited with code {code} and left no reason{inside(places[rank])}")
    if first.is_user_error:
        return Failure(first.message, USER_ERROR, may_pass=False)
    silent = [
        f"{rank} hangs{inside(place)}" + (f" and {states[rank]}" if rank in states else "")
        for rank, place in places.items()
        if rank not in heard and rank not in codes and rank not in idle
    ]
    if first.is_lost_peer and silent:
        reason = in_one_line(first.message)
        return Failure(f"rank {', '.join(silent)}: rank {first.rank} waited in vain ({reason})")
    place = inside(places.get(first.rank, ""))
    if first.is_stalled:
        rank = next((rank for rank in states if rank not in idle), first.rank)
        state = f" and {states[rank]}" if rank in states else ""
        return Failure(f"rank {rank} hangs{inside(places.get(rank, ''))}{state}: {first.message}")
    held = memory.told(first.rank, first.time) if memory is not None and first.lacks_host_memory else ""
    message = "; ".join(filter(None, (first.message, held)))
    return Failure(f"rank {first.rank} failed{place}: {message}", traceback=first.traceback)


def num_killed_for_memory() -> int:
    """Counts the processes that the kernel has killed for lack of memory since it started; 0 if it does not tell."""
    try:
        counts = dict(line.split() for line in _VMSTAT.read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))


def _ended_by_signal(rank: int, number: int, place: str, num_killed: int, held: str) -> Failure:
    name = signal.Signals(number).name
    cause = "; ".join(filter(None, ("out of memory: the kernel ended it", held)))
    memory = f" ({cause})" if number == signal.SIGKILL and num_killed else ""
    message = f"rank {rank} was ended by {name}{memory}{inside(place)}; the other ranks were stopped"
    if number in STOP_SIGNALS:  # before the rank could handle it
        return Failure(message, code_of_signal(number), may_pass=False)
    return Failure(message)


def inside(place: str) -> str:
    """Returns " in PLACE", to follow what happened there in a message; "" for an empty `Activity.place`."""
    return f" in {place}" if place else ""
