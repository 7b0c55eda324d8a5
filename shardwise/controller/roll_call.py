"""Which rank is gone, on whatever host: ranks that end leave word in the store of all, and those that live answer."""

import json
import socket
import time
from contextlib import suppress
from dataclasses import asdict

import torch.distributed as dist

from shardwise.controller.exit_codes import FAILURE, USER_ERROR
from shardwise.controller.failures import Failure, Note

_CALLED = "roll/called"
_SECONDS_BETWEEN_LOOKS = 0.1
_MOST_NAMED = 8
"""Ranks. A host that is gone may have had more."""


class RollCall:
    """Of all ranks, seen by one of them."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size

    def enter(self) -> None:
        """Says where this rank is."""
        self._store.set(_host_of(self._rank), socket.gethostname())

    def answer(self) -> None:
        """Says that this rank lives, if the roll is called. Raises RuntimeError: the store is gone."""
        if self._store.check([_CALLED]):
            self._store.set(_answer_of(self._rank), "")

    def leave(self, note: Note) -> None:
        """Says why this rank ends."""
        with suppress(RuntimeError):  # rank 0 is gone, and the store with it
            self._store.set(_note_of(self._rank), json.dumps(asdict(note)))

    def call(self, *, seconds: float) -> Failure | None:
        """Why a rank lost another one: what that one said, or else that it is silent; None if all live, or where the
        store is gone. The others get so many seconds to answer."""
        try:
            self._store.set(_CALLED, "")
            silent = {rank for rank in range(self._world_size) if rank != self._rank}
            deadline = time.monotonic() + seconds
            while True:
                notes = [note for rank in range(self._world_size) if (note := self._note(rank)) is not None]
                causes = [note for note in notes if not note.is_lost_peer]
                if causes:
                    return self._failed(min(causes, key=lambda note: note.rank))
                silent -= {note.rank for note in notes}
                silent = {rank for rank in silent if not self._store.check([_answer_of(rank)])}
                if not silent or time.monotonic() > deadline:
                    return self._gone(sorted(silent)) if silent else None
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        except RuntimeError:
            return None

    def _note(self, rank: int) -> Note | None:
        if not self._store.check([_note_of(rank)]):
            return None
        return Note(**json.loads(self._store.get(_note_of(rank))))

    def _failed(self, note: Note) -> Failure:
        return Failure(
            f"rank {note.rank}{self._place(note.rank)} failed: {note.message}",
            USER_ERROR if note.is_user_error else FAILURE,
        )

    def _gone(self, ranks: list[int]) -> Failure:
        named = ", ".join(f"rank {rank}{self._place(rank)}" for rank in ranks[:_MOST_NAMED])
        more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
        verb, whose = ("is", "its process was") if len(ranks) == 1 else ("are", "their processes were")
        return Failure(
            f"{named}{more} {verb} gone and left no word: {whose} killed, or the host or the network to it is down; "
            "torchrun on that host tells the exit signal, and the same command goes on from the last checkpoint"
        )

    def _place(self, rank: int) -> str:
        host = _host_of(rank)
        return f" on {self._store.get(host).decode()}" if self._store.check([host]) else ""


def _host_of(rank: int) -> str:
    return f"roll/host/{rank}"


def _answer_of(rank: int) -> str:
    return f"roll/answer/{rank}"


def _note_of(rank: int) -> str:
    return f"roll/note/{rank}"
