"""Allows one writer for each run: two would move each other's files away."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from shardwise.config import ConfigError
from shardwise.console import warn
from shardwise.durable import is_still_at

LOCK = "run.lock"
"""File in a run's output folder while it is written to; says as JSON by whom."""
_TRAINING = "trainer.output_dir"
"""The config key that names a run's folder."""
_LOOK_SECONDS = 0.2
"""How long to try to lock: longer than `require_no_writer` in another process holds its lock while it looks."""
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class WriterLock:
    """This process's lock on a run's folder."""

    def __init__(self, run: Path, key: str) -> None:
        """Locks the folder. Raises ConfigError: another process holds it. Raises OSError: it cannot be written to."""
        self._path, self._key = run / LOCK, key
        self._file = _lock(self._path, key)

    def require(self) -> None:
        """Checks that this process still holds the folder, and takes the lock again if its file was removed, which lets
        another process in.

        Raises:
            ConfigError: another process, which is named, holds the folder by now, or the folder is gone.
        """
        if is_still_at(self._file, self._path):
            return
        try:
            file = _lock(self._path, self._key)
        except FileNotFoundError:
            raise ConfigError(
                f"{self._key}={self._path.parent} was removed or moved while this run wrote there, or its disk is not "
                "mounted any more"
            ) from None
        except OSError as error:
            raise no_place(self._path.parent, self._key, error) from None
        warn(f"{self._path} was removed while this run writes there; it is there again and keeps others out")
        self._file.close()
        self._file = file

    def release(self) -> None:
        if is_still_at(self._file, self._path):
            self._path.unlink(missing_ok=True)
        self._file.close()


@contextmanager
def writer_lock(run: Path, *, key: str = _TRAINING) -> Iterator[WriterLock]:
    """Inside, this process holds the run's folder, which is made if there is none. The lock is the operating system's
    and ends with the process, however that ends; the file's content only says who has it.

    Args:
        key: the config key that names the folder.
    Raises:
        ConfigError: another process, which is named, holds the folder, or it cannot be written to.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = WriterLock(run, key)
    except OSError as error:
        raise no_place(run, key, error) from None
    try:
        yield lock
    finally:
        lock.release()


def require_no_writer(run: Path, *, key: str = _TRAINING) -> None:
    """Checks early, before anything is built, that no other process holds the run's folder; `writer_lock` decides.

    Raises:
        ConfigError: another process, which is named, holds the folder, or the path cannot be a folder.
    """
    try:
        with (run / LOCK).open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _refusal(file, run, key) from None
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise no_place(run, key, error) from None


def _lock(path: Path, key: str) -> IO[str]:
    """Opens and locks the file at `path`. Raises ConfigError: another process has it. Raises OSError."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            _take(file, path, key)
            if is_still_at(file, path):
                file.truncate(0)
                file.write(json.dumps(_self()))
                file.flush()
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # its last holder removed it after it was opened here; a new file is needed


def _take(file: IO[str], path: Path, key: str) -> None:
    deadline = time.monotonic() + _LOOK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _refusal(file, path.parent, key) from None
            time.sleep(_LOOK_SECONDS / 10)
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
        warn(
            f"the file system of {path.parent} has no locks ({error}), so nothing keeps a second run from writing "
            "there; start only one"
        )


def no_place(run: Path, key: str, error: OSError) -> ConfigError:
    """Returns what a user is told of a folder that a run cannot write to."""
    if run.is_symlink() and not run.exists():
        goal = os.readlink(run)
        return ConfigError(f"{key}={run} is a link to {goal}, which is not there; make that folder")
    return ConfigError(f"{key}={run} cannot be written to: {error}; give a folder that you may write to")


def _refusal(file: IO[str], run: Path, key: str) -> ConfigError:
    return ConfigError(
        f"{key}={run} is written to by {_holder(file)}; wait until it is done or end it, or give this run another {key}"
    )


def _self() -> dict[str, str | int]:
    since = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since}


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        who = json.loads(file.read())
        return f"process {who['pid']} on {who['host']}, since {who['since']}"
    except (ValueError, TypeError, KeyError):  # it has the lock and has not written its name yet
        return "another process"
