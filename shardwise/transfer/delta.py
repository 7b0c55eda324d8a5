"""Sends only what changed: the elements of each tensor whose bits differ from the last version that both sides
committed.

A step at a small learning rate changes a few percent of the weights in bfloat16. A changed element costs its value and
two bytes for its position in its block of 65,536 elements. A tensor that would not get smaller is sent whole.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.transfer.buckets import Encoding, Entry, as_bytes
from shardwise.transfer.receipt import WeightSyncError

_BLOCK_BITS = 16
_POSITION_BYTES = 2
_COUNT_BYTES = 8
_BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeltaEncoder:
    """The sender's side: holds a copy of the weights of the last version, on the device where buckets lie."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._last: dict[str, Tensor] = {}
        self._is_delta = False

    def begin(self, base_versions: Sequence[int | None]) -> None:
        """Decides whether this sync sends changes: only if the last version is what every receiver holds."""
        self._is_delta = self._version is not None and set(base_versions) == {self._version}
        self._version = None  # until this sync is committed the copy belongs to no version

    def encode(self, name: str, tensor: Tensor) -> tuple[Encoding, Tensor]:
        """Encodes a contiguous tensor [...] as [num_bytes] uint8; one that has not changed takes no bytes."""
        last = self._last.get(name)
        if last is None or (last.dtype, last.shape) != (tensor.dtype, tensor.shape):
            self._last[name] = tensor.clone()
            return "whole", as_bytes(tensor)
        if not self._is_delta:
            last.copy_(tensor)
            return "whole", as_bytes(tensor)
        bits, last_bits = _bits(tensor), _bits(last)
        places = (bits != last_bits).nonzero()[:, 0]
        if not places.numel():
            return "delta", torch.empty(0, dtype=torch.uint8, device=tensor.device)
        if _delta_bytes(tensor, places.numel()) >= tensor.nbytes:
            last.copy_(tensor)
            return "whole", as_bytes(tensor)
        values = bits[places]
        last_bits[places] = values
        counts = torch.bincount(places >> _BLOCK_BITS, minlength=_num_blocks(tensor.numel()))
        positions = (places & ((1 << _BLOCK_BITS) - 1)).to(torch.int16)  # wraps; read back without a sign
        return "delta", torch.cat([as_bytes(counts), as_bytes(values), as_bytes(positions)])

    def commit(self, version: int) -> None:
        """Notes that all receivers hold what was encoded since `begin`."""
        self._version = version


class DeltaDecoder:
    """The receiver's side. Changes are applied to what the engine can read back; of other tensors it keeps a copy."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._copies: dict[str, Tensor] = {}

    def begin(self) -> int | None:
        """Returns the version that changes can be applied to; None: this sync has to bring everything. Until it is
        committed there is no such version."""
        version, self._version = self._version, None
        return version

    def commit(self, version: int) -> None:
        """Notes that what was decoded since `begin` is served."""
        self._version = version

    def decode(self, entry: Entry, payload: Tensor, served: Tensor) -> Tensor:
        """Returns the whole tensor; one that changes are applied to is on the device of its base.

        Args:
            payload: [entry.num_bytes] uint8.
            served: what the engine serves under this name before the sync, on the meta device if it cannot tell.
        Raises:
            WeightSyncError: bytes that cannot be changes of such a tensor.
        """
        if entry.encoding == "whole":
            tensor = entry.tensor(payload)
            self._copies.pop(entry.name, None)  # an engine may become able to read back what it serves
            if served.is_meta:
                self._copies[entry.name] = tensor.clone()
            return tensor
        tensor = (
            self._copies[entry.name] if served.is_meta else served.detach().clone(memory_format=torch.contiguous_format)
        )
        bits = _bits(tensor)
        places, values = _changes(entry, payload.to(bits.device), bits)
        bits[places] = values
        return tensor


def _changes(entry: Entry, payload: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the places [N] int64 and the values [N] of the changed elements."""
    if not payload.numel():
        return torch.empty(0, dtype=torch.int64, device=payload.device), bits[:0]
    head = _COUNT_BYTES * _num_blocks(bits.numel())
    num_changed, rest = divmod(payload.numel() - head, bits.itemsize + _POSITION_BYTES)
    if num_changed < 0 or rest:
        raise WeightSyncError(f"{entry.name}: {payload.numel()} bytes are no changes of {list(entry.shape)} elements")
    sizes = [head, num_changed * bits.itemsize, num_changed * _POSITION_BYTES]
    parts = [part.clone() for part in payload.split(sizes)]  # aligned
    counts, values, positions = (
        part.view(d) for part, d in zip(parts, (torch.int64, bits.dtype, torch.int16), strict=True)
    )
    if int(counts.sum()) != num_changed:
        raise WeightSyncError(f"{entry.name}: {int(counts.sum())} changes are announced, {num_changed} came")
    blocks = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return (blocks << _BLOCK_BITS) + (positions.to(torch.int64) & ((1 << _BLOCK_BITS) - 1)), values


def _bits(tensor: Tensor) -> Tensor:
    """Views a contiguous tensor [...] as integers [N], the same memory: NaNs compare equal, 0 and -0 do not."""
    return tensor.view(-1).view(_BITS_OF[tensor.itemsize])


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // (1 << _BLOCK_BITS))


def _delta_bytes(tensor: Tensor, num_changed: int) -> int:
    return _COUNT_BYTES * _num_blocks(tensor.numel()) + num_changed * (tensor.itemsize + _POSITION_BYTES)
