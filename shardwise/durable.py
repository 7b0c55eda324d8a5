"""Durable files: what was written survives a power cut once these functions return, and is still where it was
written."""

import os
from pathlib import Path
from typing import IO, Any


def fsync_path(path: Path) -> None:
    """Makes one file durable, or the names in one folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Makes the files of a folder, and their names in it, durable. Raises OSError."""
    for path in (*folder.iterdir(), folder):
        fsync_path(path)


def is_still_at(file: IO[Any], path: Path) -> bool:
    """Whether an open file is still the one at `path`, neither removed nor moved. Raises OSError."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
