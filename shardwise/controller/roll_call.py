"""Finds which rank is gone, on whatever host: ranks that end leave a note in the store that all share, and living ones
keep answering there."""

import json
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

import torch.distributed as dist

from shardwise.controller.exit_codes import FAILURE, USER_ERROR
from shardwise.controller.failures import Failure, Note, inside
from shardwise.controller.watchdog import own_activity

_SECONDS_BETWEEN_LOOKS = 0.25
_MOST_NAMED = 8
"""Most ranks that a message lists; a host that is gone may have had more."""
_LOSSES = "roll/losses"
DONE = b"done"
"""The last answer of a rank that is no longer needed."""


class RollCall:
    """The roll call of all ranks, seen by one of them."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._rank = store, rank
        self._others = [other for other in range(world_size) if other != rank]
        self._num_answers = 0

    def enter(self) -> None:
        """Records the host of this rank."""
        self._store.set(_host_of(self._rank), socket.gethostname())

    def answer(self) -> None:
        """Records that this rank lives, and what it does. Raises RuntimeError: the store is gone."""
        self._num_answers += 1
        activity = own_activity()
        self._store.set(
            _answer_of(self._rank), f"{self._num_answers} {'' if activity.is_idle else activity.place}".rstrip()
        )

    def leave(self, note: Note) -> None:
        """Records why this rank ends."""
        self._say(_note_of(self._rank), json.dumps(asdict(note)))

    def report_hanging(self, rank: int, place: str) -> None:
        """Records that another rank hangs, and is ended for it. `place`: of its `Activity`."""
        note = Note(
            rank=rank,
            time=time.monotonic(),
            message=f"it hangs{inside(place)}",
            traceback="",
            is_user_error=False,
            is_lost_peer=False,
            is_timeout=False,
        )
        self._say(_note_of(rank), json.dumps(asdict(note)))

    def report_loss(self) -> None:
        """Records that another rank closed its connection to this one without a farewell. Raises RuntimeError: the
        store is gone."""
        self._store.add(_LOSSES, 1)

    def num_losses(self) -> int:
        """Returns how many losses were reported. Raises RuntimeError: the store is gone."""
        return self._store.add(_LOSSES, 0)

    def has_left(self) -> bool:
        """Returns whether this rank has recorded why it ends. Raises RuntimeError: the store is gone."""
        return self._store.check([_note_of(self._rank)])

    def finish(self) -> None:
        """Records that this rank is no longer needed."""
        self._say(_answer_of(self._rank), DONE.decode())

    def answers(self) -> dict[int, bytes]:
        """Returns the last answer of each other rank that has given any. Raises RuntimeError: the store is gone."""
        ranks = self._others
        if not self._store.check([_answer_of(rank) for rank in ranks]):
            ranks = [rank for rank in ranks if self._store.check([_answer_of(rank)])]
        return dict(zip(ranks, self._store.multi_get([_answer_of(rank) for rank in ranks]), strict=True))

    def why_one_is_lost(self, *, seconds: float) -> Failure | None:
        """Returns why this rank lost another one: the reason that this one left, or else that it is silent; None if all
        live, or if the store is gone. The others have `seconds` to answer."""
        try:
            before, silent = self.answers(), set(self._others)
            deadline = time.monotonic() + seconds
            while True:
                notes = [note for rank in self._others if (note := self._note(rank)) is not None]
                if causes := [note for note in notes if not note.is_lost_peer]:
                    return self._failed(causes[0])
                answered = {rank for rank, one in self.answers().items() if one == DONE or one != before.get(rank)}
                silent -= answered.union(note.rank for note in notes)
                if not silent or time.monotonic() > deadline:
                    return self._gone(sorted(silent)) if silent else None
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        except RuntimeError:
            return None

    def hanging(self) -> str:
        """Lists in words the ranks at work that have not given up though this one waited for them in vain, with what
        they do; "" if there are none, or if the store is gone."""
        try:
            places = {rank: place.decode() for rank, answer in self.answers().items() if (place := _place_in(answer))}
            names = [
                f"{self.named([rank])} hangs{inside(place)}"
                for rank, place in places.items()
                if self._note(rank) is None
            ]
        except RuntimeError:
            return ""
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return ", ".join(names[:_MOST_NAMED]) + more

    def named(self, ranks: Sequence[int]) -> str:
        """Lists ranks with their hosts, in words. Raises RuntimeError: the store is gone."""
        more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
        return ", ".join(f"rank {rank}{self._place(rank)}" for rank in ranks[:_MOST_NAMED]) + more

    def _say(self, key: str, text: str) -> None:
        with suppress(RuntimeError):  # rank 0 is gone, and the store with it
            self._store.set(key, text)

    def _note(self, rank: int) -> Note | None:
        if not self._store.check([_note_of(rank)]):
            return None
        return Note(**json.loads(self._store.get(_note_of(rank))))

    def _failed(self, note: Note) -> Failure:
        return Failure(
            f"{self.named([note.rank])} failed: {note.message}", USER_ERROR if note.is_user_error else FAILURE
        )

    def _gone(self, ranks: Sequence[int]) -> Failure:
        verb, whose = ("is", "its process was") if len(ranks) == 1 else ("are", "their processes were")
        return Failure(
            f"{self.named(ranks)} {verb} gone and left no word: {whose} killed or stopped, or the host or the network "
            "to it is down; torchrun on that host tells the exit signal, and the same command goes on from the last "
            "checkpoint"
        )

    def _place(self, rank: int) -> str:
        host = _host_of(rank)
        return f" on {self._store.get(host).decode()}" if self._store.check([host]) else ""


def _host_of(rank: int) -> str:
    return f"roll/host/{rank}"


def _answer_of(rank: int) -> str:
    return f"roll/answer/{rank}"


def _place_in(answer: bytes) -> bytes:
    """Returns what a rank does, from its answer; empty if it is done or waits to be told what to do."""
    return answer.partition(b" ")[2]


def _note_of(rank: int) -> str:
    return f"roll/note/{rank}"
