"""How ranks watch each other where no launcher of ours does, as under torchrun: the first that gives up on another one
collects the stacks of all ranks of its host, rank 0 is sent a signal that any rank got and says which rank is gone, and
rank 0 and the others exchange signs of life."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from shardwise.config import in_one_line
from shardwise.controller.exit_codes import FAILURE, code_of_signal
from shardwise.controller.failures import Failure, Note, explain, inside, note_failure, read_notes
from shardwise.controller.launch import SETTLE_SECONDS
from shardwise.controller.process_group import Rank, another_connection
from shardwise.controller.roll_call import DONE, RollCall
from shardwise.controller.signals import SecondSignal
from shardwise.controller.watchdog import Activity, be_watched, collect, wait_until_collected, write_reports
from shardwise.scratch import scratch_folder

_ASKED = "asked"
_STOP = "stop"
"""Key in the store: the signal that a rank other than 0 got."""
_SIGNS = "signs_of_life"
"""Key in the store: how many signs of life rank 0 has given."""
_SECONDS_BETWEEN_LOOKS = 1.0
_LEAST_SILENCE_SECONDS = 60.0
"""Not less: native code that holds Python's lock keeps a living rank from giving signs of life too."""
_LATER_SECONDS = 30.0
"""How much longer rank 0 waits than a collective would, since the error of a collective tells more."""
_LEAVE_SECONDS = 5.0
"""Time for the rank that reports why the job ends, before others of its host leave too: more than SETTLE_SECONDS and
_ANSWER_SECONDS together."""
_ANSWER_SECONDS = 2.5
"""Time for the others to answer: more than _SECONDS_BETWEEN_LOOKS."""


class Peers:
    """The ranks of this host, seen by one of them."""

    def __init__(self, folder: Path, rank: Rank, reports: Path | None, store: dist.Store) -> None:
        """
        Args:
            folder: where the ranks of this host keep their activity.
            reports: the folder for reports of what every rank did when one hung; None writes none.
            store: the store that all ranks share.
        """
        self._folder, self._rank, self._reports, self._store = folder, rank.rank, reports, store
        self._world_size = rank.world_size
        self._roll = RollCall(store, rank.rank, rank.world_size)
        self._second = SecondSignal()

    def pass_on(self, number: int) -> None:
        """Passes a signal on to rank 0, on whatever host: only one host may be about to be taken away. A second signal
        ends this rank, which may hang: torchrun sends it to every rank of its host, and waits for them."""
        if self._second.has_come():
            time.sleep(_LEAVE_SECONDS)
            os._exit(code_of_signal(number))
        with suppress(RuntimeError):  # rank 0 is gone, and the store with it
            self._store.set(_STOP, str(number))

    def note_failure(self, error: BaseException) -> int:
        """Does what `failures.note_failure` does. If this rank waited in vain, it also names the rank that hangs and
        writes all stacks. The rank that is gone is named by rank 0, or by a rank of its host that waited in vain."""
        note = Note.of(error, self._rank)
        self._roll.leave(note)
        is_in_vain = note.is_timeout or note.is_stalled
        try:
            note.leave(self._folder)
            if self._rank > 0 and (note.is_shared or (note.is_lost_peer and not is_in_vain)):
                time.sleep(_LEAVE_SECONDS)  # torchrun ends rank 0 as soon as another one has left
            if not is_in_vain:
                return self._note_loss(error, note) if note.is_lost_peer else note_failure(error, self._rank)
            (self._folder / _ASKED).touch(exist_ok=False)
        except FileNotFoundError:  # the first rank of this host has left, and its folder with it
            return note_failure(error, self._rank)
        except FileExistsError:  # another rank collects already, and reports what it finds
            wait_until_collected(self._folder)
            time.sleep(_LEAVE_SECONDS)
            return FAILURE
        failure, hanging = self._explain()
        failure.print()
        for pid in hanging:  # torchrun would give them 30 s
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return failure.code

    def _note_loss(self, error: BaseException, note: Note) -> int:
        failure = self._roll.why_one_is_lost(seconds=_ANSWER_SECONDS) if self._rank == 0 else None
        if failure is None:
            return note_failure(error, self._rank)
        failure.print()
        return failure.code

    def _explain(self) -> tuple[Failure, list[int]]:
        """Returns why this rank gives up, and the ids of the processes that hang."""
        time.sleep(SETTLE_SECONDS)  # others that wait in vain stay until they are asked
        notes, activities = read_notes(self._folder), self._activities()
        pids = {rank: activity.pid for rank, activity in activities.items() if _is_alive(activity.pid)}
        errors = {note.rank: note.traceback or note.message for note in notes}
        reports, states = collect(self._folder, activities, pids, errors)
        stacks = self._written(reports)
        places = {rank: activity.place for rank, activity in activities.items()}
        idle = {rank for rank, activity in activities.items() if activity.is_idle and rank not in states}
        failure = explain({}, notes, places, states, idle=idle, num_killed=0)
        spared = idle.union(note.rank for note in notes)
        hanging = [rank for rank in pids if rank not in spared]
        for rank in hanging:
            self._roll.report_hanging(rank, places[rank])
        if notes[0].is_lost_peer and not hanging and len(activities) < self._world_size:
            failure = self._explain_elsewhere(notes[0], places)
        return replace(failure, message=failure.message + stacks), [pids[rank] for rank in hanging]

    def _explain_elsewhere(self, note: Note, places: Mapping[int, str]) -> Failure:
        """Returns why ranks of this host, of which `note` is one's, waited in vain: for ranks of other hosts."""
        reason = in_one_line(note.message)
        if 0 in places:  # elsewhere the store may be out of reach
            lost = self._roll.why_one_is_lost(seconds=_ANSWER_SECONDS)
            if lost is not None:
                waited = f"rank {self._rank} waited{inside(places.get(self._rank, ''))}"
                return replace(lost, message=f"{lost.message}; {waited}")
            if hanging := self._roll.hanging():
                return Failure(f"{hanging}: rank {note.rank} waited in vain ({reason})")
        return Failure(
            f"rank {note.rank} waited in vain{inside(places.get(note.rank, ''))} ({reason}): no rank on "
            f"{socket.gethostname()} hangs, so one on another host does, or is gone, or the network to it is down"
        )

    def _written(self, reports: Mapping[int, str]) -> str:
        """Writes the reports. Returns the end of a message that says where they are; "" if none are kept."""
        if self._reports is None:
            return ""
        try:
            return f"; stacks of the ranks on {socket.gethostname()}: {write_reports(self._reports, reports)}"
        except OSError as error:
            return f"; stacks could not be written to {self._reports}: {error}"

    def _activities(self) -> dict[int, Activity]:
        ranks = [int(path.name.removeprefix("activity-")) for path in self._folder.glob("activity-*")]
        found = {rank: Activity.read(self._folder, rank) for rank in sorted(ranks)}
        return {rank: activity for rank, activity in found.items() if activity is not None}


@contextmanager
def watched_by_peers(rank: Rank, store: dist.Store, reports: Path | None, *, timeout_seconds: float) -> Iterator[Peers]:
    """Inside, ranks watch each other. Every rank of a host keeps its activity in one folder, which the first of them
    makes, and rank 0 is sent the signals that others pass on. The others end when rank 0 has given no sign of life for
    `timeout_seconds`, at least a minute. Rank 0 ends when one of them is reported lost (`neighbours.py`) and does not
    answer, or has given no sign of life for half a minute more than that.

    Waits for: the first rank of the host. Unblocked by: the timeout of the store.
    """
    beside = another_connection(store)
    roll = RollCall(beside, rank.rank, rank.world_size)
    roll.enter()
    silence = max(timeout_seconds, _LEAST_SILENCE_SECONDS)
    company = (
        _hearing(beside, roll, silence + _LATER_SECONDS)
        if rank.rank == 0
        else _listening(beside, roll, silence, _silent(f"rank {rank.rank}: rank 0", silence).end_process)
    )
    with company, _watched_on_host(rank, store, reports) as peers:
        yield peers


@contextmanager
def _watched_on_host(rank: Rank, store: dist.Store, reports: Path | None) -> Iterator[Peers]:
    host = f"watched/{os.environ.get('GROUP_RANK', socket.gethostname())}"
    if rank.local_rank > 0:
        folder = Path(store.get(host).decode())
        be_watched(rank.rank, folder)
        yield Peers(folder, rank, reports, store)
        return
    with scratch_folder() as folder:
        store.set(host, str(folder))
        be_watched(rank.rank, folder)
        yield Peers(folder, rank, reports, store)


@contextmanager
def _hearing(store: dist.Store, roll: RollCall, silence_seconds: float) -> Iterator[None]:
    """Inside, rank 0 gives signs of life, is sent the first signal that another rank passes on, and ends when a rank is
    lost, or silent for `silence_seconds`: no collective may be running that would notice, as while rank 0 waits for a
    judge or for that rank's part of a save."""

    def hear(is_over: threading.Event) -> None:
        is_told = False
        with suppress(RuntimeError):  # the store is gone: the job ends
            while True:
                store.add(_SIGNS, 1)
                if not is_told and store.check([_STOP]):
                    os.kill(os.getpid(), int(store.get(_STOP)))
                    is_told = True
                if is_over.wait(_SECONDS_BETWEEN_LOOKS):
                    return

    def miss(is_over: threading.Event) -> None:
        silences, num_asked = _Silences(), 0
        with suppress(RuntimeError):
            while not is_over.wait(_SECONDS_BETWEEN_LOOKS):
                at_work = {rank: answer for rank, answer in roll.answers().items() if answer != DONE}
                if missed := silences.missed(at_work, silence_seconds):
                    _silent(roll.named(missed), silence_seconds).end_process()
                    return
                if (num_losses := roll.num_losses()) > num_asked:
                    num_asked = num_losses
                    if is_over.wait(_LEAVE_SECONDS) or roll.has_left():
                        return  # the main thread has found out, and tells more
                    if (lost := roll.why_one_is_lost(seconds=_ANSWER_SECONDS)) is not None:
                        lost.end_process()
                        return

    with _threads(hear, miss):
        yield


@contextmanager
def _listening(store: dist.Store, roll: RollCall, silence_seconds: float, end: Callable[[], None]) -> Iterator[None]:
    """Inside, this rank gives signs of life, and `end` is called when rank 0 has given none for `silence_seconds`: a
    host that loses its power or its network closes no connection, and this rank would wait on for its next command."""
    num_signs = 0

    def listen(is_over: threading.Event) -> None:
        nonlocal num_signs
        with suppress(RuntimeError):  # the store is gone: no sign comes any more
            while not is_over.wait(_SECONDS_BETWEEN_LOOKS):
                num_signs = store.add(_SIGNS, 0)  # blocks if the host of the store has vanished
                roll.answer()

    def judge(is_over: threading.Event) -> None:
        silences = _Silences({0: num_signs})
        while not is_over.wait(_SECONDS_BETWEEN_LOOKS):
            if silences.missed({0: num_signs}, silence_seconds):
                end()
                return

    with _threads(listen, judge):
        yield
    roll.finish()


class _Silences:
    """How long ranks have given no new sign of life: counted in looks and not by the clock, because a process that is
    stopped hears nothing either."""

    def __init__(self, signs: Mapping[int, object] = MappingProxyType({})) -> None:
        self._signs, self._seconds = signs, dict.fromkeys(signs, 0.0)

    def missed(self, signs: Mapping[int, object], seconds: float) -> list[int]:
        """Takes the signs of one more look. Returns the ranks that have been silent for `seconds`."""
        self._seconds = {
            rank: self._seconds[rank] + _SECONDS_BETWEEN_LOOKS if self._signs.get(rank) == sign else 0.0
            for rank, sign in signs.items()
        }
        self._signs = signs
        return [rank for rank, silent in self._seconds.items() if silent >= seconds]


def _silent(whose: str, silence_seconds: float) -> Failure:
    return Failure(
        f"{whose} has given no sign of life for {silence_seconds:.0f} s (engine.collective_timeout_seconds, at least "
        f"{_LEAST_SILENCE_SECONDS:.0f}): the host or the network to it is down, or the process was killed or is "
        "stopped; the same command goes on from the last checkpoint"
    )


@contextmanager
def _threads(*bodies: Callable[[threading.Event], None]) -> Iterator[None]:
    """Inside, each body runs in a thread until the event that it is given is set, at the end."""
    is_over = threading.Event()
    threads = [threading.Thread(target=body, args=[is_over], name=body.__name__, daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(_SECONDS_BETWEEN_LOOKS)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
