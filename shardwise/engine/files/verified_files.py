"""Files that show when they were cut or changed: sizes and xxh3 hashes, and JSON that carries its own hash.

A hash tells a bad disk or a bad copy from good data. It is no signature: who can write the files can write the hashes.
Callers, who know what a damaged file belongs to, say what to do about it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash

from shardwise.config import DamagedError
from shardwise.durable import to_json, write_json_atomic
from shardwise.engine.files.safetensors_file import BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and hash by which a file is recognized.

    Example: `FileRecord(num_bytes=1520, xxh3="5d41402abc4b2a76")`
    """

    num_bytes: int
    xxh3: str
    """64 bits, in hexadecimal."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Reads the whole file. Raises OSError."""
        digest, num_bytes = xxhash.xxh3_64(), 0
        buffer = memoryview(bytearray(BLOCK_BYTES))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                num_bytes += count
        return cls(num_bytes, digest.hexdigest())

    def check(self, path: Path) -> None:
        """Raises DamagedError: there is no such file, or it is not the one that was recorded."""
        check_size(path, self.num_bytes)
        if FileRecord.of(path).xxh3 != self.xxh3:
            raise DamagedError(f"{path} is damaged: its xxh3 hash is not the one that was recorded")


def check_size(path: Path, num_bytes: int) -> None:
    """Raises DamagedError: there is no such file, or it was cut."""
    if not path.is_file():
        raise DamagedError(f"{path} is missing")
    if (size := path.stat().st_size) != num_bytes:
        raise DamagedError(f"{path} is damaged: it has {size} bytes, {num_bytes} were written")


def bytes_hash(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def write_sealed_json(path: Path, content: Any) -> None:
    """Writes {"xxh3": of the content, "content": ...} whole or not at all; durable once its folder is.
    Raises OSError."""
    read = json.loads(to_json(content))  # the hash is of what will be read: text for keys, null for NaN
    write_json_atomic(path, {"xxh3": bytes_hash(_canonical(read)), "content": read})


def read_sealed_json(path: Path) -> Any:
    """Returns the content. Raises DamagedError: there is no such file, it is not JSON, or not the content that was
    written."""
    try:
        text = path.read_text(encoding="utf-8")
        sealed = json.loads(text)
        if bytes_hash(_canonical(sealed["content"])) == sealed["xxh3"] and text.endswith("\n"):
            return sealed["content"]
        reason = (
            "its content does not have the xxh3 hash that it names" if text.endswith("\n") else "its end is missing"
        )
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"it is not what was written ({type(error).__name__}: {error})"
    raise DamagedError(f"{path} is damaged: {reason}")


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
