"""Helpers for processes that start others: children that do not outlive them, and words for how one ended."""

import ctypes
import fcntl
import os
import signal
import time
from collections import deque
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TRACKER_SECONDS = 5.0
_GLANCE_SECONDS = 0.02
_NUM_LAST_LINES = 5
_LAST_LINE_CHARACTERS = 200
_OF_A_JOB = ("WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""How the environment variables of a rank's process group begin: with them, another program would try to join it."""


def variables_of_its_own() -> dict[str, str]:
    """Returns this process's environment variables, without those that say how its ranks meet."""
    return {name: value for name, value in os.environ.copy().items() if not name.startswith(_OF_A_JOB)}


def die_with(parent: int) -> None:
    """Has the kernel end this process when the thread that started it is gone, whatever this process is doing, even
    where it is stopped. Processes that it has started are not ended.

    Args:
        parent: id of that thread's process. Where it is gone already, this process ends here.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the line above
        os._exit(1)


def end_group_with(lifeline_fd: int) -> None:
    """Has the kernel signal this process group (SIGIO ends a process) when the parent's end of the pipe closes, on
    purpose or because the parent is gone.

    Reading another pipe to its end is not enough: a call that hangs does not read, and one that spins in C would not
    let a watching thread run either.
    """
    os.set_inheritable(lifeline_fd, False)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)


def start_resource_tracker() -> None:
    """Starts Python's resource tracker so that the signal of `end_group_with` does not end it: it removes the shared
    memory that the other processes leave behind."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # which the tracker inherits
    resource_tracker.ensure_running()
    signal.signal(signal.SIGIO, signal.SIG_DFL)


def end_group(group: int) -> None:
    """Kills the processes of a group, Python's resource tracker last: it removes the shared memory that they leave
    behind, within a moment."""
    deadline = time.monotonic() + _TRACKER_SECONDS
    while (living := _living(group)) and time.monotonic() < deadline:
        for process in (process for process, is_tracker in living.items() if not is_tracker):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_GLANCE_SECONDS)
    with suppress(ProcessLookupError):  # nobody is left
        os.killpg(group, signal.SIGKILL)


def mapped_files(group: int) -> set[Path]:
    """Returns the files that the processes of a group have mapped into memory, those that still have a name."""
    found = set()
    for process in _living(group):
        with suppress(OSError):  # the process ended meanwhile
            lines = Path(f"/proc/{process}/maps").read_text().splitlines()
            found |= {Path("/" + line.partition("/")[2]) for line in lines if "/" in line}
    return {path for path in found if path.is_file()}


def _living(group: int) -> dict[int, bool]:
    """Returns process id -> whether it is a resource tracker, for the living processes of a group. Ended ones that
    nobody has waited for are left out."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process ended meanwhile
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found[int(folder.name)] = b"multiprocessing.resource_tracker" in (folder / "cmdline").read_bytes()
    return found


def how_it_ended(code: int) -> str:
    """Puts an exit code, as subprocess counts them, in words that follow a name."""
    if code >= 0:
        return f"ended its process with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # most real-time signals have no name
        name = f"signal {-code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"ended its process by {name}{hint}"


class LastLines:
    """The last lines that a process printed, for the error that reports its end."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)

    def add(self, line: bytes) -> str:
        """Adds a line, and returns it as a terminal shows it: of a progress bar, its last state."""
        text = line.decode(errors="replace").rstrip().rpartition("\r")[2]
        if text:
            self._lines.append(text[:_LAST_LINE_CHARACTERS])
        return text

    def __str__(self) -> str:
        """Writes the lines to follow how the process ended; empty where it printed nothing."""
        return f"; it last printed: {' | '.join(self._lines)}" if self._lines else ""
