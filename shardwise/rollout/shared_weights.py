"""Weights in host memory that both a rank and the process of its rollout engine have mapped."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from shardwise.memfd import create_memory, mapped

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a tensor that an engine takes.

    Example: `Form("model.norm.weight", "bfloat16", [1024], is_readable=True)`
    """

    name: str
    dtype: str
    """torch's name of the dtype, without the prefix "torch."."""
    shape: list[int]
    is_readable: bool
    """Whether the engine can read back the values that it serves."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Self:
        """Returns the form of `tensor`, which is on the meta device if its values cannot be read."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), not tensor.is_meta)

    def on_meta(self) -> Tensor:
        """Returns a tensor of this form on the meta device."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="meta")


class SharedWeights:
    """Tensors of given forms, one after the other, in memory that is sized for them on the first call of `tensor`.

    Both sides lay out the same forms in the same way, so that they only need to tell each other names.
    """

    def __init__(self, forms: Iterable[Form], descriptor: int | None = None) -> None:
        """
        Args:
            descriptor: descriptor of the memory that the other side has created; None creates it.
        """
        self.descriptor = create_memory() if descriptor is None else descriptor
        self._memory: Tensor | None = None
        self._places: dict[str, tuple[Tensor, int]] = {}
        self._num_bytes = 0
        for form in forms:
            empty = form.on_meta()
            self._places[form.name] = empty, self._num_bytes
            self._num_bytes += -(-empty.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def tensor(self, name: str) -> Tensor:
        """Returns the tensor of that name; the other side sees what is written to it."""
        if self._memory is None:
            os.ftruncate(self.descriptor, self._num_bytes)
            self._memory = mapped(self.descriptor)
        empty, offset = self._places[name]
        return self._memory[offset : offset + empty.nbytes].view(empty.dtype).view(empty.shape)

    def close(self) -> None:
        """Releases the memory, which is freed when the other side has released it too."""
        os.close(self.descriptor)
        self._memory = None


def packed(forms: Iterable[Form]) -> list[list[Any]]:
    """Converts forms to what messages can hold."""
    return [[form.name, form.dtype, form.shape, form.is_readable] for form in forms]


def unpacked(forms: Iterable[list[Any]]) -> Iterator[Form]:
    """Converts what `packed` returned back to forms."""
    return (Form(*form) for form in forms)
