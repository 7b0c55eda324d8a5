"""Parts of tensors, such as what one of the ranks that share an engine needs of a weight."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Span = tuple[int, int]
"""The first index and the one after the last."""


@dataclass(frozen=True, slots=True)
class Region:
    """The elements of a tensor whose index lies, in every dimension, in one of the spans given for it.

    Example: rows 0-3 and 8-11 of a [16, 4] tensor are `Region((((0, 4), (8, 12)), ((0, 4),)))`, of shape [8, 4].
    """

    spans: tuple[tuple[Span, ...], ...]
    """For each dimension in ascending order, neither touching nor empty."""

    @classmethod
    def box(cls, spans: Iterable[Span]) -> "Region":
        """Returns the region of one span for each dimension, which may be empty."""
        return cls(tuple(_joined([span]) for span in spans))

    @classmethod
    def whole(cls, shape: Iterable[int]) -> "Region":
        """Returns the region of all elements of a tensor."""
        return cls.box((0, size) for size in shape)

    @classmethod
    def of_lists(cls, spans: Iterable[Iterable[Iterable[int]]]) -> "Region":
        """Returns the region whose `spans` were turned into lists, as JSON does."""
        return cls(tuple(tuple((start, stop) for start, stop in of_dim) for of_dim in spans))

    @property
    def shape(self) -> torch.Size:
        """Shape of what the region holds, put together."""
        return torch.Size(sum(stop - start for start, stop in spans) for spans in self.spans)

    def __or__(self, other: "Region") -> "Region":
        """The smallest region that holds both."""
        return Region(tuple(_joined([*own, *others]) for own, others in zip(self.spans, other.spans, strict=True)))

    def among_rows(self, start: int, stop: int) -> "Region":
        """Returns its part in these rows (indices of dim 0), as a region of a tensor of those alone."""
        first, *others = self.spans
        rows = ((max(begin, start) - start, min(end, stop) - start) for begin, end in first)
        return Region((_joined(rows), *others))

    def of(self, tensor: Tensor) -> Tensor:
        """Returns what it holds of a tensor: a view, unless some dimension has several spans."""
        for dim, spans in enumerate(self.spans):
            pieces = [tensor.narrow(dim, start, stop - start) for start, stop in spans or ((0, 0),)]
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        return tensor

    def inside(self, outer: "Region") -> "Region":
        """Returns where it lies in what `outer` holds. Raises ValueError: `outer` lacks some of it."""
        return Region(tuple(_inside(own, others) for own, others in zip(self.spans, outer.spans, strict=True)))


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Returns spans in their order, those that touch or overlap as one, without empty ones."""
    joined: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            first, last = joined.pop()
            start, stop = first, max(stop, last)
        joined.append((start, stop))
    return tuple(joined)


def _inside(spans: Sequence[Span], outer: Sequence[Span]) -> tuple[Span, ...]:
    found, offset = [], 0
    for first, last in outer:
        held = [(start, stop) for start, stop in spans if first <= start and stop <= last]
        found += [(start - first + offset, stop - first + offset) for start, stop in held]
        offset += last - first
    if len(found) < len(spans):
        raise ValueError(f"{list(spans)} is not in {list(outer)}")
    return _joined(found)
