"""Temporary folders that outlive their process, should it be killed, only until the next one is made."""

import fcntl
import functools
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = f"shardwise-scratch-{socket.gethostname()}-"
"""Of this host alone: where TMPDIR is shared, the locks of another one may not be seen here."""


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """An empty folder for this user alone, in `parent`, else in TMPDIR or /tmp, that is removed with what is in it at
    the end.

    Meanwhile this process locks it. The lock is the operating system's and ends with the process, however that ends;
    the first folder that a process makes there is preceded by removing those that nobody locks.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_abandoned(parent)
    unlocked = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))  # by this name nobody looks for it
    folder = unlocked.with_name(unlocked.name.removeprefix("."))
    descriptor = os.open(unlocked, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks, where nobody can lock it in order to remove it either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


@functools.cache
def _remove_abandoned(parent: Path) -> None:
    """Leaves alone what belongs to other users or cannot be locked."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid != os.geteuid():
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
