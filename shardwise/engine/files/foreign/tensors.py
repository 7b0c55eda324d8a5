"""Tensors that lie in pieces in the files of several ranks."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from shardwise.config import ConfigError, ModelError
from shardwise.engine.files.export import require_finite
from shardwise.engine.files.safetensors_file import TensorSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]
    """Returns the box, [*sizes], on the host."""

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def overlaps(self, other: "Piece") -> bool:
        pairs = zip(self.box, other.box, strict=True)
        return all(mine.start < theirs.stop and theirs.start < mine.stop for mine, theirs in pairs)


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor whose pieces make it up, each element once."""

    spec: TensorSpec
    pieces: list[Piece]

    @classmethod
    def of(cls, name: str, spec: TensorSpec, pieces: Iterable[Piece], *, origin: Path) -> Self:
        """Puts pieces together: the first of those in the same place (replicas) is taken, empty ones are left out.

        Raises:
            ModelError: the pieces do not make up the tensor.
        """
        by_place = {piece.offsets: piece for piece in reversed(list(pieces)) if 0 not in piece.sizes}
        found = [by_place[place] for place in sorted(by_place)]
        num_elements = sum(math.prod(piece.sizes) for piece in found)
        if num_elements != math.prod(spec.shape) or _overlap(found) or not all(_is_inside(p, spec) for p in found):
            raise ModelError(
                f"{origin}: the ranks hold {num_elements} of the {math.prod(spec.shape)} elements of {name} "
                f"{list(spec.shape)}, or some of them twice; copy the files of all ranks of one save again"
            )
        return cls(spec, found)

    def read(self) -> Tensor:
        """Returns the whole tensor, on the host."""
        if len(self.pieces) == 1:
            return self.pieces[0].read()
        whole = torch.empty(self.spec.shape, dtype=self.spec.dtype)
        for piece in self.pieces:
            whole[piece.box] = piece.read()
        return whole


@dataclass(frozen=True, slots=True)
class ShardedTensors:
    """The tensors of a checkpoint by name."""

    folder: Path
    """Where the tensors come from, for errors."""
    tensors: Mapping[str, ShardedTensor]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: tensor.spec for name, tensor in self.tensors.items()}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.spec.nbytes for tensor in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """Returns a whole tensor, on the host. Raises ModelError: a file is damaged or asks to run code."""
        return self.tensors[name].read()

    def under(self, prefix: str) -> "ShardedTensors":
        """Returns the tensors whose names begin with the prefix, under their names without it."""
        chosen = {name: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}
        return ShardedTensors(self.folder, {name.removeprefix(prefix): tensor for name, tensor in chosen.items()})

    def finite_in(self, dtype: torch.dtype) -> "ShardedTensors":
        """Returns the same tensors, but reading one that holds NaN or an infinity in the dtype raises ExportError."""

        def looked_through(name: str) -> Tensor:
            tensor = self.read(name)
            require_finite({name: tensor.to(dtype)})
            return tensor

        wholes = {
            name: ShardedTensor(spec, [Piece((0,) * len(spec.shape), spec.shape, partial(looked_through, name))])
            for name, spec in self.specs.items()
        }
        return ShardedTensors(self.folder, wholes)

    def meant_prefix(self, prefix: str) -> str:
        """Returns the prefix with a dot behind it if it was given without one and names begin so."""
        dotted = f"{prefix}."
        return dotted if prefix and any(name.startswith(dotted) for name in self.tensors) else prefix

    def prefix_of(self, wanted: Collection[str], *, suffix: str = "", near: str = "") -> str | None:
        """Returns the prefix of most of the wanted names, where each is followed by `suffix`; None if none of them is
        there. Of prefixes that fit equally well it is the one that has the longest beginning in common with `near`.

        Raises:
            ConfigError: several prefixes fit equally well.
        """
        found: Counter[str] = Counter()
        for name in self.tensors:
            if name.endswith(suffix):
                parts = name.removesuffix(suffix).split(".")
                places = (place for place in range(len(parts)) if ".".join(parts[place:]) in wanted)
                found.update("".join(f"{part}." for part in parts[:place]) for place in places)
        fits = {prefix: (count, _num_common_parts(prefix, near)) for prefix, count in found.items()}
        best = sorted(prefix for prefix, fit in fits.items() if fit == max(fits.values()))
        if len(best) > 1:
            raise ConfigError(
                f"{self.folder} holds {len(best)} models that fit config.json, under {', '.join(map(repr, best))}; "
                "choose one with --prefix"
            )
        return best[0] if best else None


def _num_common_parts(one: str, other: str) -> int:
    """How many parts, between dots, two names have in common from the first on."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_inside(piece: Piece, spec: TensorSpec) -> bool:
    return len(piece.offsets) == len(spec.shape) and all(
        part.start >= 0 and part.stop <= size for part, size in zip(piece.box, spec.shape, strict=True)
    )


def _overlap(pieces: list[Piece]) -> bool:
    """Whether any of the pieces overlap, which are in the order of their offsets; each is compared with those that
    reach into its first row."""
    reaching: list[Piece] = []
    for piece in pieces:
        reaching = [other for other in reaching if other.box and other.box[0].stop > piece.box[0].start]
        if any(piece.overlaps(other) for other in reaching):
            return True
        reaching.append(piece)
    return False
