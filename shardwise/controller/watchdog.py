"""Shows from outside what every rank is doing, even one that was killed, is stopped, or hangs in a library.

A rank keeps its activity (step, phase, command) in a mapped file, and writes its Python stacks into another one when it
gets SIGUSR1 or crashes. Our launcher reads both and writes them into the run's folder; without it, as under torchrun,
the first rank that gives up does so (`peers.py`).
"""

import faulthandler
import json
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from shardwise.fault_plan import plan

REPORTS = "faults"
"""Subfolder of an output folder for reports of what every rank did when one of them hung or crashed."""
JOB_FOLDER_VARIABLE = "SHARDWISE_JOB_FOLDER"
"""Environment variable: the folder in which the launcher and its ranks leave files for each other."""
_DUMP_SIGNAL = signal.SIGUSR1
_DUMP_SECONDS = 2.0
"""Time for a rank to write its stacks; a rank that gives up waits at most twice as long for the others to be asked."""
_POLL_SECONDS = 0.05
_RECORD_BYTES = 512
_WORD_CHARACTERS = 40
_COLLECTED = "collected"
_STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "D": "waits inside the kernel"}
"""States in /proc/PID/stat in which a process cannot answer."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a rank is doing."""

    step: int | None = None
    """None before the first. Ranks that only serve learn it from the first command of the step."""
    phase: str = ""
    """Phase of the recipe, such as rollout or train; empty on ranks that only serve."""
    command: str = ""
    """The method that it serves or calls, and the first short text among its arguments, such as the role of an engine;
    if several threads do, one such command for each."""
    since: float = 0.0
    """When this activity began or last reported progress, as time.monotonic()."""
    deadline_seconds: float = 0.0
    """How long its command may wait for other ranks before it raises by itself; 0 if it does more than wait."""
    serves: bool = False
    """Whether it does nothing but serve commands."""
    pid: int = 0
    """Id of the rank's process."""

    @classmethod
    def read(cls, folder: Path, rank: int) -> Self | None:
        """Reads the activity of a rank; None if it keeps none, or has not started keeping it."""
        try:
            return cls(**json.loads((folder / f"activity-{rank}").read_bytes()))
        except (OSError, ValueError):  # ValueError: read while it was being changed
            return None

    @property
    def place(self) -> str:
        """Text such as "step 3, train, `train policy`"; empty if neither step, phase nor command is set."""
        step = "" if self.step is None else f"step {self.step}"
        command = f"`{self.command}`" if self.command else ""
        return ", ".join(part for part in (step, self.phase, command) if part)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a command."""
        return self.serves and not self.command

    @property
    def seconds(self) -> float:
        """Seconds since the activity began or last reported progress."""
        return time.monotonic() - self.since


class _Record:
    """This rank's activity; if others watch it, also in a file that outlives the process."""

    def __init__(self, path: Path | None) -> None:
        self._map: mmap.mmap | None = None
        if path is not None:
            path.write_bytes(bytes(_RECORD_BYTES))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _RECORD_BYTES)
        self.activity = Activity(pid=os.getpid())
        self._commands: dict[int, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self.change()

    def change(self, **fields: Any) -> None:
        """Sets fields of the Activity."""
        with self._lock:
            self._write(**fields)

    def command(self, command: str, deadline_seconds: float = 0.0) -> None:
        """Sets the command that this thread serves or calls; "" for none."""
        with self._lock:
            self._commands.pop(threading.get_ident(), None)
            if command:
                self._commands[threading.get_ident()] = command, deadline_seconds
            commands = self._commands.values()
            self._write(
                command="` and `".join(text for text, _ in commands),
                deadline_seconds=max((seconds for _, seconds in commands), default=0.0),
            )

    def _write(self, **fields: Any) -> None:
        self.activity = replace(self.activity, since=time.monotonic(), **fields)
        if self._map is not None:
            self._map[:] = json.dumps(asdict(self.activity)).encode().ljust(_RECORD_BYTES)[:_RECORD_BYTES]


_record = _Record(None)
"""The record of this process."""


def be_watched(rank: int, folder: Path | None = None) -> None:
    """Begins to keep this rank's activity; called when the rank starts. `folder`: where others look for it; None: the
    launcher's, if there is one."""
    global _record
    if folder is None:
        if JOB_FOLDER_VARIABLE not in os.environ:
            _record = _Record(None)
            return
        folder = Path(os.environ[JOB_FOLDER_VARIABLE])
    stacks = (folder / f"stacks-{rank}").open("w")  # stays open as long as this process lives
    faulthandler.enable(stacks)
    faulthandler.register(_DUMP_SIGNAL, stacks)
    _record = _Record(folder / f"activity-{rank}")  # last: a rank that has a record can handle the signal


def enter_step(step: int | None) -> None:
    """Records which step the recipe begins, for those that watch from outside and for the fault plan."""
    plan().step = step
    _record.change(step=step, phase="")


def enter_phase(phase: str) -> None:
    """Records the phase of the recipe in its step; "" for one without a name."""
    _record.change(phase=phase)


def enter_service() -> None:
    """Records that this rank does nothing from here on but serve commands."""
    _record.change(serves=True)


def go_on() -> None:
    """Records progress within an activity that may take hours."""
    _record.change()


def own_activity() -> Activity:
    """Returns this rank's activity."""
    return _record.activity


@contextmanager
def commanded(method: str, arguments: Sequence[Any], *, deadline_seconds: float = 0.0) -> Iterator[None]:
    """Records that the body serves or calls a method.

    Args:
        deadline_seconds: how long the body may wait for other ranks, without hearing from them, before it raises; 0 if
            it does more than that.
    """
    texts = (argument for argument in arguments if isinstance(argument, str))
    word = next((text for text in texts if 0 < len(text) <= _WORD_CHARACTERS), "")
    _record.command(f"{method} {word}".rstrip(), deadline_seconds)
    yield
    _record.command("")  # kept after an error, to tell where it happened


def wait_until_collected(folder: Path) -> None:
    """Waits until the stacks of all ranks are collected, for a few seconds at most. Called by a rank that gives up
    waiting for another one, before it leaves: its end would free or fail the others, and their stacks would be lost."""
    collected = folder / _COLLECTED
    deadline = time.monotonic() + 2 * _DUMP_SECONDS
    while time.monotonic() < deadline and not collected.exists():
        time.sleep(_POLL_SECONDS)


def collect(
    folder: Path, ranks: Iterable[int], pids: Mapping[int, int], errors: Mapping[int, str]
) -> tuple[dict[int, str], dict[int, str]]:
    """Asks every rank for its stacks, and reports what it is doing.

    Args:
        folder: where the ranks keep their activity.
        pids: rank -> process id, for ranks that live.
        errors: rank -> error, for ranks that are about to leave or have left.
    Returns:
        Rank -> a report for people, with activity, error and stacks; and, for ranks that did not answer, rank -> why.
    """
    silent = _ask(folder, pids)
    reports = {rank: _report(folder, rank, pids.get(rank), silent.get(rank), errors.get(rank, "")) for rank in ranks}
    (folder / _COLLECTED).touch()
    return reports, silent


def write_reports(target: Path, reports: Mapping[int, str]) -> Path:
    """Writes the reports into a new numbered subfolder of `target`, and returns that. Raises OSError."""
    target.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name) for path in target.iterdir() if path.name.isdecimal()), default=0)
    chosen = target / str(number)
    try:
        chosen.mkdir()
    except FileExistsError:  # another host was faster
        return write_reports(target, reports)
    for rank, report in reports.items():
        (chosen / f"rank_{rank}.txt").write_text(report)
    return chosen


def _ask(folder: Path, pids: Mapping[int, int]) -> dict[int, str]:
    """Has living ranks write their stacks. Returns, for ranks that did not answer, rank -> why."""
    watched = {rank: pid for rank, pid in pids.items() if Activity.read(folder, rank) is not None}
    files = {rank: folder / f"stacks-{rank}" for rank in watched}
    sizes = before = {rank: file.stat().st_size for rank, file in files.items()}
    for pid in watched.values():
        with suppress(ProcessLookupError):  # it may have ended just now
            os.kill(pid, _DUMP_SIGNAL)
    deadline, settled = time.monotonic() + _DUMP_SECONDS, False
    while time.monotonic() < deadline and not settled:
        time.sleep(_POLL_SECONDS)
        last, sizes = sizes, {rank: file.stat().st_size for rank, file in files.items()}
        settled = all(sizes[rank] == last[rank] > before[rank] for rank in files)
    silent = {rank: pid for rank, pid in pids.items() if rank not in watched or sizes[rank] == before[rank]}
    return {rank: _state(pid) if rank in watched else "has not started yet" for rank, pid in silent.items()}


def _state(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:  # ended meanwhile, or a system without /proc
        return "does not answer"
    return _STATES.get(state, "does not answer")


def _report(folder: Path, rank: int, pid: int | None, silence: str | None, error: str) -> str:
    activity, stacks = Activity.read(folder, rank), folder / f"stacks-{rank}"
    place = "not started yet" if activity is None else f"{activity.place or 'no command'}, for {activity.seconds:.1f} s"
    process = "ended" if pid is None else f"process {pid}" + (f" {silence}" if silence else "")
    parts = [f"rank {rank}: {place}\n{process}\n", error, stacks.read_text() if stacks.exists() else ""]
    return "\n".join(part for part in parts if part)
