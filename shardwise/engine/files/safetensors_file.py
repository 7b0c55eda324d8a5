"""One file in the safetensors format: 8 bytes of header length, a JSON header, the tensors' bytes one after the other.

Source: https://github.com/huggingface/safetensors#format. The package itself maps files into memory (a failing disk
then kills the process, and mapped pages count as ours) and writes a file from tensors that all exist at once. Here a
slice is read by plain reads, which fail with an exception, and a file is written tensor by tensor, in any order.
"""

import ctypes
import errno
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor

from shardwise.config import DamagedError, ModelError
from shardwise.fault_plan import fault_point
from shardwise.ops import is_finite

DTYPE_NAMES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""In the order of the format's own enumeration: tensors of later dtypes come first in a file."""
_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPE_NAMES.values())}
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPE_NAMES.items()}

BLOCK_BYTES = 1 << 20
"""Bytes that fit a processor's cache, so that what one step has read another step need not fetch again."""

FLUSH_BYTES = 1 << 23
"""After so many bytes the kernel is told to begin, so that the disk works while the rest is written."""

Box = Sequence[slice]
"""Start and stop in every dimension."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a file says about a tensor before its bytes are read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(tensor.dtype, tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def differences(wanted: Mapping[str, object], stored: Mapping[str, object]) -> str:
    """For errors: says what is missing, what is too much and what is not as it should be; "" if nothing is.

    Args:
        wanted, stored: name of a tensor -> a form that can be compared and shown, such as a TensorSpec or a shape.
    """
    lists = {
        "missing": sorted(wanted.keys() - stored.keys()),
        "not part of the model": sorted(stored.keys() - wanted.keys()),
        "of the wrong shape or dtype": [
            f"{name} is {stored[name]}, expected {form}"
            for name, form in wanted.items()
            if name in stored and stored[name] != form
        ],
    }
    return "; ".join(
        f"{len(names)} {label}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for label, names in lists.items()
        if names
    )


def host_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, which has to outlive it. (A storage that numpy has seen can never
    be resized again.)"""
    return memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class SafetensorsReader:
    """A file that is open for reading. The header is read and checked at once, tensors when they are asked for."""

    def __init__(self, path: Path, *, require_finite: bool = False) -> None:
        """
        Args:
            require_finite: whether reading NaN or an infinity is an error.
        Raises:
            DamagedError: no such file, truncated, or not in the format. ModelError: it cannot be opened.
        """
        self.path = path
        self._require_finite = require_finite
        opened = None
        try:
            opened = self._file = path.open("rb", buffering=0)
            self._data_start, self._entries = self._read_header()
        except (OSError, ValueError, KeyError, RecursionError) as error:
            if opened is not None:
                opened.close()
            reason = f"its header lacks {error}" if isinstance(error, KeyError) else error
            raise _error_for(error)(
                f"{path} cannot be read as a safetensors file: {reason}; download or copy it again"
            ) from None

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: spec for name, (spec, _) in self._entries.items()}

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Name -> where the tensor's bytes begin in the file, and how many there are."""
        return {name: (self._data_start + start, spec.nbytes) for name, (spec, start) in self._entries.items()}

    def read(self, name: str, box: Box, *, may_be_infinite: bool = False) -> Tensor:
        """Reads the part of a tensor inside `box`, to the host, in the dtype of the file; nothing else is read.

        Args:
            may_be_infinite: whether an infinity is none of the errors of `require_finite`.
        Raises:
            ModelError: the file system could not deliver it, or it has to be finite and is not.
        """
        result = torch.empty([part.stop - part.start for part in box], dtype=self._entries[name][0].dtype)
        self.read_into(result, name, box)
        if self._require_finite and not is_finite(result, may_be_infinite=may_be_infinite):
            raise ModelError(
                f"{self.path}: {name} holds NaN or infinities, so nothing could be computed with it; copy the file "
                "again, or take an earlier checkpoint"
            )
        return result

    def read_into(
        self, target: Tensor, name: str, box: Box, *, seen: Callable[[memoryview], object] = lambda block: None
    ) -> None:
        """Reads the part of a tensor inside `box` into existing memory.

        Args:
            target: contiguous, on the host, in the dtype of the file and of the shape of the box.
            seen: gets the bytes in their order, block by block, while the block is in the processor's cache.
        Raises:
            ModelError: the file system could not deliver it.
        """
        if not target.numel():
            return
        spec, start = self._entries[name]
        data, done = host_bytes(target), 0
        for offset, num_bytes in _runs(spec, box):
            for place in range(offset, offset + num_bytes, BLOCK_BYTES):
                block = data[done : done + min(BLOCK_BYTES, offset + num_bytes - place)]
                self._read_block(block, name, start + place)
                seen(block)
                done += len(block)

    def blocks(self, name: str) -> Iterator[memoryview]:
        """Yields the bytes of a tensor block by block, each in the memory of the one before. Raises ModelError as
        `read`."""
        spec, start = self._entries[name]
        buffer = memoryview(bytearray(min(BLOCK_BYTES, spec.nbytes)))
        for offset in range(0, spec.nbytes, BLOCK_BYTES):
            block = buffer[: spec.nbytes - offset]
            self._read_block(block, name, start + offset)
            yield block

    def close(self) -> None:
        self._file.close()

    def _read_header(self) -> tuple[int, dict[str, tuple[TensorSpec, int]]]:
        """Returns where the data begin, and for each tensor its spec and its offset from there."""
        size = os.fstat(self._file.fileno()).st_size
        if size < 8:
            raise ValueError(f"it has {size} bytes, fewer than the 8 of the header's length")
        length = int.from_bytes(self._bytes(8), "little")
        if 8 + length > size:
            raise ValueError(f"its header would end at byte {8 + length}, and the file at {size}")
        self.header = self._bytes(8 + length)
        """All that stands before the tensors' bytes."""
        header = json.loads(self.header[8:])
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        metadata = header.pop("__metadata__", None)
        self.metadata: dict[str, str] = metadata if isinstance(metadata, dict) else {}
        """The file's own metadata."""
        entries = {name: _entry(name, entry) for name, entry in header.items()}
        end = 0
        for name, (spec, start) in sorted(entries.items(), key=lambda item: (item[1][1], item[1][0].nbytes)):
            if start != end:  # else one tensor would be read from the bytes of another
                raise ValueError(f"{name} begins at byte {start} of the data, where the tensor before ends at {end}")
            end += spec.nbytes
        if 8 + length + end != size:
            raise ValueError(f"its tensors end at byte {8 + length + end}, and the file at {size}")
        return 8 + length, entries

    def _bytes(self, length: int) -> bytes:
        buffer = bytearray(length)
        self._fill(memoryview(buffer), 0)
        return bytes(buffer)

    def _read_block(self, target: memoryview, name: str, offset: int) -> None:
        """Reads bytes of a tensor into `target`, from `offset` on, counted from where the data begin. Raises
        ModelError."""
        try:
            self._fill(target, self._data_start + offset)
        except (OSError, ValueError) as error:
            message = f"{self.path}: {name} cannot be read: {error}; download or copy it again"
            raise _error_for(error)(message) from None

    def _fill(self, target: memoryview, offset: int) -> None:
        """Reads the file's bytes from `offset` on into `target`. Threads may read at once: they share no position in
        it."""
        done = 0
        while done < len(target):  # one call returns at most 2 GiB
            count = os.preadv(self._file.fileno(), [target[done:]], offset + done)
            if not count:
                raise ValueError(f"the file ends at byte {offset + done}, the tensor at {offset + len(target)}")
            done += count


class SafetensorsWriter:
    """A file that is being written: the header at once, tensors as they come. `close` makes it durable.

    The bytes of the finished file are those of `safetensors.torch.save_file(..., metadata={"format": "pt"})`.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        ordered = sorted(specs, key=lambda name: (-_RANKS[specs[name].dtype], name))
        ends = list(itertools.accumulate(specs[name].nbytes for name in ordered))
        starts = [end - specs[name].nbytes for name, end in zip(ordered, ends, strict=True)]
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, start, end in zip(ordered, starts, ends, strict=True):
            spec = specs[name]
            header[name] = {"dtype": NAME_OF_DTYPE[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
        encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.header = len(encoded).to_bytes(8, "little") + encoded
        """All that stands before the tensors' bytes."""
        data_start = len(self.header)
        self._specs = dict(specs)
        self._offsets = {name: data_start + start for name, start in zip(ordered, starts, strict=True)}
        self._file = path.open("wb", buffering=0)
        self._unflushed: list[tuple[int, int]] = []
        self._write_all(self.header)

    @property
    def is_complete(self) -> bool:
        return not self._offsets

    def write(self, name: str, tensor: Tensor, *, seen: Callable[[memoryview], object] = lambda block: None) -> None:
        """Writes a tensor from any device; each name once, in any order. `seen` gets every block of its bytes in turn,
        while the block is in the processor's cache."""
        assert TensorSpec.of(tensor) == self._specs[name], f"{name}: {TensorSpec.of(tensor)}, not {self._specs[name]}"
        offset = self._offsets.pop(name)
        self._file.seek(offset)
        on_host = tensor.detach().cpu().contiguous()
        data = host_bytes(on_host)
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            seen(block)
            self._write_all(block)
            self._note_unflushed(offset + start, len(block))

    def close(self) -> None:
        assert self.is_complete, f"{sorted(self._offsets)} were never written"
        fault_point("write")
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Leaves the file as it is, unfinished."""
        self._file.close()

    def _note_unflushed(self, offset: int, num_bytes: int) -> None:
        """Notes where the last block is. By itself the kernel only writes pages that are old or too many; told that
        nobody will read them (POSIX_FADV_DONTNEED), it begins at once and does not wait."""
        self._unflushed.append((offset, num_bytes))
        if sum(count for _, count in self._unflushed) >= FLUSH_BYTES:
            for span in self._unflushed:
                os.posix_fadvise(self._file.fileno(), *span, os.POSIX_FADV_DONTNEED)
            self._unflushed = []

    def _write_all(self, data: bytes | memoryview) -> None:
        fault_point("write")
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += self._file.write(view[done:])


def _error_for(error: Exception) -> type[ModelError]:
    """DamagedError if the file is to blame, ModelError if it is the reader: permissions, too many open files."""
    is_readers = isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.EIO, errno.EISDIR)
    return ModelError if is_readers else DamagedError


def _entry(name: str, entry: object) -> tuple[TensorSpec, int]:
    if not isinstance(entry, dict):
        raise ValueError(f"its header has {entry!r} for {name}, and not an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_NAMES:
        raise ValueError(f"{name} has dtype {dtype}; known are {', '.join(DTYPE_NAMES)}")
    if not _are_counts(shape):
        raise ValueError(f"{name} has shape {shape!r}, which is not a list of sizes")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has data_offsets {offsets!r}, which are not the bytes where it begins and ends")
    spec = TensorSpec(DTYPE_NAMES[dtype], tuple(shape))
    start, end = offsets
    if end - start != spec.nbytes:
        raise ValueError(f"{name} has {end - start} bytes, {list(spec.shape)} of {spec.dtype} is {spec.nbytes}")
    return spec, start


def _are_counts(values: object) -> TypeGuard[list[int]]:
    """Whether it is a list of integers from 0 on; JSON's true and false do not count as such."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _runs(spec: TensorSpec, box: Box) -> Iterator[tuple[int, int]]:
    """Yields (offset, length) in bytes of the pieces of a box that are contiguous in the file, in order."""
    itemsize = spec.dtype.itemsize
    strides = [math.prod(spec.shape[dim + 1 :]) * itemsize for dim in range(len(spec.shape))]
    cut = [dim for dim, part in enumerate(box) if (part.start, part.stop) != (0, spec.shape[dim])]
    if not cut:
        yield 0, spec.nbytes
        return
    inner = cut[-1]  # the dimensions after it are taken whole
    length = (box[inner].stop - box[inner].start) * strides[inner]
    for index in itertools.product(*(range(part.start, part.stop) for part in box[:inner])):
        start = sum(i * stride for i, stride in zip(index, strides[:inner], strict=True))
        yield start + box[inner].start * strides[inner], length
