"""Temporary folders that, if their process is killed, remain only until another process makes one."""

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
"""Names this host: if TMPDIR is shared between hosts, the locks of another host may not be visible here."""


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Makes an empty folder that only this user can access, in `parent` or else in TMPDIR or /tmp, and removes it with
    its contents at the end.

    This process locks it meanwhile. The lock is the operating system's and ends with the process, however that ends.
    Before its first folder in a place, a process removes those there that nobody locks.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_abandoned(parent)
    unlocked = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))  # no other process looks for this name
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
    """Removes the folders of this host that nobody locks; leaves alone those that belong to other users or cannot be
    locked."""
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
