"""Makes files survive a power cut: what was written is on the disk when these return."""

import os
from pathlib import Path


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
