"""Files as readers and power cuts find them: whole, durable, and still where they were written."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from shardwise.fault_plan import fault_point


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


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """Opens a text file that takes the place of the one at `path` when the body is done: a reader finds the old file or
    the whole new one, whenever it looks, and so does who comes after a power cut: the new one for sure once its folder
    is durable too (`fsync_path`). One process at a time may do this for a path.

    Raises:
        OSError: the file cannot be written; the old one is intact.
    """
    temporary = path.with_name(f".{path.name}.tmp")  # one name: what a killed process has left is written over
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json_atomic(path: Path, value: Any) -> None:
    """Writes a value as indented JSON; see `replacing`. Raises OSError: the file cannot be written."""
    fault_point("write")
    with replacing(path) as file:
        file.write(to_json(value, indent=2) + "\n")
        fault_point("write")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Writes a value as JSON, as all files of a run have it: null for NaN and infinities, "?" for half a surrogate
    pair."""
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="replace").decode()


def _finite(value: Any) -> Any:
    """Returns the value with None for NaN and infinities, for which JSON has no words and which many readers refuse."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
