"""What every rank is doing, seen from outside: also of a rank that was killed, is stopped, or hangs in a library.

A rank keeps its activity (step, phase, command) in a mapped file, and writes its Python stacks into another one when it
gets SIGUSR1, or crashes. The launcher reads both and leaves them in the run's folder; where there is none of ours, as
under torchrun, the first rank that gives up does (`peers.py`).
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
"""In an output folder: what every rank did when one of them hung or crashed."""
JOB_FOLDER_VARIABLE = "SHARDWISE_JOB_FOLDER"
"""Where the launcher and its ranks leave files for each other."""
_DUMP_SIGNAL = signal.SIGUSR1
_DUMP_SECONDS = 2.0
"""What a rank gets to write its stacks; a rank that gives up waits twice as long for the others to be asked."""
_POLL_SECONDS = 0.05
_RECORD_BYTES = 512
_WORD_CHARACTERS = 40
_COLLECTED = "collected"
_STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "D": "waits inside the kernel"}
"""Of /proc/PID/stat, those in which a process cannot answer."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a rank is doing."""

    step: int | None = None
    """None before the first. Ranks that only serve hear of it with the first command in it."""
    phase: str = ""
    """Of the recipe, such as rollout or train; empty on ranks that only serve."""
    command: str = ""
    """The method that it serves or calls, and the first short text among its arguments, such as the role of an engine.
    Of every thread that does."""
    since: float = 0.0
    """When this began or last went on, as time.monotonic()."""
    deadline_seconds: float = 0.0
    """How long its command may wait for other ranks before that ends by itself; 0 where the command does more."""
    serves: bool = False
    """It does nothing but what it is told."""
    pid: int = 0
    """Of the rank's process."""

    @classmethod
    def read(cls, folder: Path, rank: int) -> Self | None:
        """Of a rank; None where it keeps none, or did not get that far."""
        try:
            return cls(**json.loads((folder / f"activity-{rank}").read_bytes()))
        except (OSError, ValueError):  # ValueError: read in the middle of a change
            return None

    @property
    def place(self) -> str:
        """As in "step 3, train, `train policy`"; empty where it is nowhere in particular."""
        step = "" if self.step is None else f"step {self.step}"
        command = f"`{self.command}`" if self.command else ""
        return ", ".join(part for part in (step, self.phase, command) if part)

    @property
    def is_idle(self) -> bool:
        """Whether it waits to be told what to do."""
        return self.serves and not self.command

    @property
    def seconds(self) -> float:
        """How long it has been there."""
        return time.monotonic() - self.since


class _Record:
    """This rank's activity, in a file that outlives it where others look at it."""

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
        """Sets what this thread serves or calls; "" for nothing."""
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
"""Of this process."""


def be_watched(rank: int, folder: Path | None = None) -> None:
    """Called by a rank when it starts. `folder`: where others look; None: that of the launcher, if there is one."""
    global _record
    if folder is None:
        if JOB_FOLDER_VARIABLE not in os.environ:
            _record = _Record(None)
            return
        folder = Path(os.environ[JOB_FOLDER_VARIABLE])
    stacks = (folder / f"stacks-{rank}").open("w")  # stays open as long as this process lives
    faulthandler.enable(stacks)
    faulthandler.register(_DUMP_SIGNAL, stacks)
    _record = _Record(folder / f"activity-{rank}")  # last: a rank that has one can take the signal


def enter_step(step: int | None) -> None:
    """Says which step the recipe begins: to whoever looks from outside, and to the fault plan."""
    plan().step = step
    _record.change(step=step, phase="")


def enter_phase(phase: str) -> None:
    """Says what the recipe does in its step; "" is nothing that has a name."""
    _record.change(phase=phase)


def enter_service() -> None:
    """Says that this rank does nothing from here on but what it is told."""
    _record.change(serves=True)


def go_on() -> None:
    """Says that this rank gets on with what it does, where that may take hours."""
    _record.change()


def own_activity() -> Activity:
    """Of this rank."""
    return _record.activity


@contextmanager
def commanded(method: str, arguments: Sequence[Any], *, deadline_seconds: float = 0.0) -> Iterator[None]:
    """The body serves or calls a method.

    Args:
        deadline_seconds: how long it may wait for other ranks, of which it hears nothing meanwhile, before it raises;
            0 where it does more than that.
    """
    texts = (argument for argument in arguments if isinstance(argument, str))
    word = next((text for text in texts if 0 < len(text) <= _WORD_CHARACTERS), "")
    _record.command(f"{method} {word}".rstrip(), deadline_seconds)
    yield
    _record.command("")  # not after an error: then it tells where


def wait_until_collected(folder: Path) -> None:
    """Called by a rank that gives up waiting for another one, before it leaves: that would free or fail the others, and
    what they are doing would be lost."""
    collected = folder / _COLLECTED
    deadline = time.monotonic() + 2 * _DUMP_SECONDS
    while time.monotonic() < deadline and not collected.exists():
        time.sleep(_POLL_SECONDS)


def collect(
    folder: Path, ranks: Iterable[int], pids: Mapping[int, int], errors: Mapping[int, str]
) -> tuple[dict[int, str], dict[int, str]]:
    """What every rank is doing.

    Args:
        folder: where they are watched.
        pids: by rank, of those that live.
        errors: by rank, of those that are about to leave or have left.
    Returns:
        By rank: a report for people, with activity, error and stacks; and why it did not answer, of those that did not.
    """
    silent = _ask(folder, pids)
    reports = {rank: _report(folder, rank, pids.get(rank), silent.get(rank), errors.get(rank, "")) for rank in ranks}
    (folder / _COLLECTED).touch()
    return reports, silent


def write_reports(target: Path, reports: Mapping[int, str]) -> Path:
    """Writes them into the next folder of `target` that is free, which is returned. Raises OSError."""
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
    """Lets living ranks write their stacks. Returns by rank why it did not answer, of those that did not."""
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
