"""A file of torch.save: a zip archive of uncompressed entries, one pickle and the bytes of every storage.

`torch.load` maps or reads all of it and imports what the pickle names. Here the pickle is read as data
(`foreign.pickles`) and bytes are read when a tensor is asked for.
"""

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.config import ModelError
from shardwise.engine.files.foreign.pickles import read_pickle
from shardwise.engine.files.safetensors_file import TensorSpec, host_bytes

_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "BFloat16": torch.bfloat16,
    "Half": torch.float16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "Untyped": torch.uint8,
}
_LOCAL_HEADER_BYTES = 30
_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file, before its bytes are read."""

    spec: TensorSpec
    file: "TorchFile"
    key: str
    """Key of the storage."""
    stride: tuple[int, ...]
    """In elements, like `offset`."""
    offset: int

    def read(self) -> Tensor:
        """Returns the tensor, on the host. Raises ModelError: the bytes are damaged or lie outside of the file."""
        return self.file.read(self)


class TorchFile:
    """What is in a file, and the bytes of its tensors when they are asked for. No file stays open."""

    content: Any
    """What was saved, with StoredTensors in the place of tensors and Records of what `records` allows."""

    def __init__(
        self, path: Path, *, records: Collection[str] = (), start: int = 0, num_bytes: int | None = None
    ) -> None:
        """
        Args:
            records: dotted names of classes and functions that the pickle may name beside those of plain tensors.
            start, num_bytes: the part of the file that is the archive; None: to the file's end.
        Raises:
            ModelError: there is no such file, it is cut, has the format before torch 1.6, or names something else.
        """
        self.path = path
        self._start = start
        self._verified: set[str] = set()
        try:
            with path.open("rb") as file:
                whole = file.seek(0, io.SEEK_END)
                self._end = whole if num_bytes is None else start + num_bytes
                if self._end > whole:
                    raise ModelError(f"{path} is cut: it has {whole} bytes and should have {self._end}; copy it again")
                window = io.BufferedReader(_Window(file, start, self._end - start))
                with zipfile.ZipFile(window) as archive:
                    self._entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                    data = self._small(archive, "data.pkl")
                    if self._small(archive, "byteorder", missing=b"little") != b"little":
                        raise ModelError(f"{path} was written on a big-endian machine; save it on another one")
        except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
            raise ModelError(
                f"{path} cannot be read as a file of torch.save: {error}; copy it again, or save it with torch 1.6 or "
                "newer if it is older"
            ) from None
        functions = {f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()} | {
            "torch.storage.UntypedStorage": torch.uint8,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_of_dtype,
            "torch._utils._rebuild_parameter": _without_gradient,
        }
        self.content = read_pickle(
            data,
            str(path),
            records=records,
            functions=functions,
            load_storage=lambda id_: _Storage(str(id_[2]), id_[1]),
        )

    def read(self, tensor: StoredTensor) -> Tensor:
        """Reads only the tensor's own bytes if it is contiguous, else its storage. A storage is compared with its
        CRC-32 before anything of it is returned.

        Raises:
            ModelError: the bytes are damaged or lie outside of the file.
        """
        spec = tensor.spec
        if 0 in spec.shape:
            return torch.empty(spec.shape, dtype=spec.dtype)
        info = self._entries.get(f"data/{tensor.key}")
        last = tensor.offset + sum((size - 1) * stride for size, stride in zip(spec.shape, tensor.stride, strict=True))
        num_stored = 0 if info is None or info.compress_type != zipfile.ZIP_STORED else info.file_size
        if info is None or min(tensor.offset, *tensor.stride, 0) < 0 or (last + 1) * spec.dtype.itemsize > num_stored:
            raise ModelError(f"{self.path} is damaged: a tensor lies outside of its data; copy it again")
        try:
            with self.path.open("rb", buffering=0) as file:
                start = self._data_start(file, info)
                self._verify(file, start, info)
                if tensor.stride == _contiguous(spec.shape):
                    return _read(file, start + tensor.offset * spec.dtype.itemsize, spec.shape, spec.dtype)
                flat = _read(file, start, (info.file_size // spec.dtype.itemsize,), spec.dtype)
                return flat.as_strided(spec.shape, tensor.stride, tensor.offset).contiguous()
        except (OSError, EOFError, struct.error) as error:
            raise ModelError(f"{self.path} cannot be read: {error}; copy it again") from None

    def _tensor(
        self, storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
    ) -> StoredTensor:
        return StoredTensor(TensorSpec(storage.dtype, tuple(size)), self, storage.key, tuple(stride), offset)

    def _tensor_of_dtype(
        self,
        storage: _Storage,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        _requires_grad: bool,
        _hooks: Any,
        dtype: torch.dtype,
        *_: Any,
    ) -> StoredTensor:
        return self._tensor(_Storage(storage.key, dtype), offset, size, stride)

    def _small(self, archive: zipfile.ZipFile, name: str, *, missing: bytes | None = None) -> bytes:
        info = self._entries.get(name)
        if info is not None and info.compress_type == zipfile.ZIP_STORED:
            return archive.read(info)
        if missing is not None:
            return missing
        raise ModelError(f"{self.path} is no file of torch.save: its archive holds no {name}; give a saved state dict")

    def _data_start(self, file: io.FileIO, info: zipfile.ZipInfo) -> int:
        """Where an entry's data begin in the file. The archive's directory does not say how long the entry's own header
        is."""
        header = self._start + info.header_offset
        file.seek(header)
        name_bytes, extra_bytes = struct.unpack_from("<HH", file.read(_LOCAL_HEADER_BYTES), 26)
        start: int = header + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        if start + info.file_size > self._end:
            raise EOFError("an entry lies beyond its end")
        return start

    def _verify(self, file: io.FileIO, start: int, info: zipfile.ZipInfo) -> None:
        if info.filename in self._verified:
            return
        file.seek(start)
        found, left = 0, info.file_size
        while left and (block := file.read(min(left, _BLOCK_BYTES))):
            found, left = zlib.crc32(block, found), left - len(block)
        if left or found != info.CRC:
            raise ModelError(f"{self.path} is damaged: {info.filename} does not have its CRC-32; copy it again")
        self._verified.add(info.filename)


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: Any, start: int, num_bytes: int) -> None:
        self._file, self._start, self._num_bytes, self._place = file, start, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._num_bytes}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._place)
        count: int = self._file.readinto(memoryview(buffer)[: max(0, self._num_bytes - self._place)])
        self._place += count
        return count


def _without_gradient(tensor: StoredTensor, *_: Any) -> StoredTensor:
    """Stands for what rebuilds a Parameter: returns its plain tensor."""
    return tensor


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _read(file: io.FileIO, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    target = host_bytes(tensor)
    file.seek(start)
    done = 0
    while done < len(target):  # one call returns at most 2 GiB
        count = file.readinto(target[done:])
        if not count:
            raise EOFError(f"it ends at byte {start + done}")
        done += count
    return tensor
