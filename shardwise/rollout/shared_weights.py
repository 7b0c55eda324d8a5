"""Weights in host memory that a rank and the process of its rollout engine have both mapped."""

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
    """A tensor that an engine takes.

    Example: `Form("model.norm.weight", "bfloat16", [1024], is_readable=True)`
    """

    name: str
    dtype: str
    """torch's name of it, without the prefix."""
    shape: list[int]
    is_readable: bool
    """Whether the engine can tell the values that it serves."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Self:
        """That of `tensor`, which is on the meta device where it cannot be read."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), not tensor.is_meta)

    def on_meta(self) -> Tensor:
        """Such a tensor without values."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="meta")


class SharedWeights:
    """The tensors of some forms, one after the other, in memory that grows to hold them with the first `tensor`.

    Both sides lay out the same forms in the same way, so that names are all they have to tell each other.
    """

    def __init__(self, forms: Iterable[Form], descriptor: int | None = None) -> None:
        """
        Args:
            descriptor: of the memory that the other side has made; None makes it.
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
        """The one of that name: what is written to it is there on the other side."""
        if self._memory is None:
            os.ftruncate(self.descriptor, self._num_bytes)
            self._memory = mapped(self.descriptor)
        empty, offset = self._places[name]
        return self._memory[offset : offset + empty.nbytes].view(empty.dtype).view(empty.shape)

    def close(self) -> None:
        """Lets go of the memory, which goes when the other side has too."""
        os.close(self.descriptor)
        self._memory = None


def packed(forms: Iterable[Form]) -> list[list[Any]]:
    """Forms as messages hold them."""
    return [[form.name, form.dtype, form.shape, form.is_readable] for form in forms]


def unpacked(forms: Iterable[list[Any]]) -> Iterator[Form]:
    """What was packed."""
    return (Form(*form) for form in forms)
