"""Weights that note which part of them is read: how an engine that keeps a part of each shows what it needs."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.config import TrainingError
from shardwise.region import Region, Span

_VIEWS = {"__getitem__", "chunk", "narrow", "permute", "select", "split", "squeeze", "t", "transpose", "unbind"}
"""Functions that may return views of a tensor."""
_TURNED = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
"""Properties that are views of a tensor."""
_FORM = {"dim", "is_contiguous", "is_floating_point", "nelement", "ndimension", "numel", "size", "stride", "__len__"}
"""Functions of shape and dtype."""
_PLACE = {
    getattr(torch.Tensor, name).__get__ for name in ("device", "is_cpu", "is_cuda", "is_meta", "is_xpu", "layout")
}
"""Properties that depend on where the values are."""


class WeightReads:
    """A weight, or a region of it, and what was read of it so far."""

    def __init__(self, name: str, shape: torch.Size, values: Tensor, held: Region | None = None) -> None:
        """
        Args:
            name: what messages call it.
            shape: of the whole weight.
            values: `held.shape`, what is there of it.
            held: None: all of it.
        """
        self.name, self._shape, self._values = name, shape, values
        self._held = Region.whole(shape) if held is None else held
        self.region = Region(tuple(() for _ in shape))
        """The smallest region that holds all that was read."""

    def traced(self) -> "TracedWeight":
        """Returns the weight as a loader takes it, of the whole shape."""
        return TracedWeight.of(torch.empty(self._shape, dtype=self._values.dtype, device="meta"), self)

    @property
    def values(self) -> Tensor:
        """What is there of the weight."""
        return self._values

    @property
    def is_blank(self) -> bool:
        """Whether the values are one number for all elements, to which nothing can be written."""
        return self._values.numel() > 1 and not any(self._values.stride())

    def take(self, view: Tensor) -> Tensor:
        """Reads what a view of the whole weight, on the meta device, shows.

        Raises:
            TrainingError: it is not there.
        """
        if not view.numel():
            return self._values.new_empty(view.shape)
        box, dims = _box(view, self._shape)
        self.region |= box
        try:
            found = box.inside(self._held).of(self._values)
        except ValueError:
            raise TrainingError(
                f"the engine reads other parts of {self.name} than it did when it was asked what it needs"
            ) from None
        if dims is None:
            return found.contiguous().as_strided(view.shape, view.stride(), view.storage_offset())
        others = [dim for dim in range(found.dim()) if dim not in dims]
        return found.permute([*dims, *others]).reshape(view.shape)


class TracedWeight(torch.Tensor):
    """Stands for a weight, or a view of one, of whichever only part may be there. What is not a view of it is computed
    with the values, which are read then."""

    _reads: WeightReads

    @classmethod
    def of(cls, view: Tensor, reads: WeightReads) -> "TracedWeight":
        """`view`: of the whole weight, on the meta device."""
        traced = view.as_subclass(cls)
        traced._reads = reads
        return traced

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        first, name = args[0] if args else None, getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(first, cls):
                if func == torch.Tensor.data.__get__ or name == "detach":  # type: ignore[attr-defined]
                    return first
                if name == "contiguous" and first.is_contiguous():
                    return first
                if name in _VIEWS or func in _TURNED:
                    found = func(*args, **kwargs)
                    if all(_is_view(one, first) for one in tree_leaves(found)):
                        return tree_map_only(Tensor, lambda view: cls.of(view, first._reads), found)
                elif name in _FORM or (name == "__get__" and func not in _PLACE):
                    return func(*args, **kwargs)
                elif func in _PLACE:
                    return func(first._reads.values)
                elif name.endswith("_") and not name.endswith("__") and first._reads.is_blank:
                    first._reads.take(first)
                    return first
            args, kwargs = tree_map_only(cls, lambda one: one._reads.take(one), (args, kwargs))
        return func(*args, **kwargs)


def _is_view(found: Tensor, whole: Tensor) -> bool:
    return found.untyped_storage()._cdata == whole.untyped_storage()._cdata


def _box(view: Tensor, shape: torch.Size) -> tuple[Region, list[int] | None]:
    """Returns the region that a view of a contiguous tensor of `shape` shows, and which of that tensor's dimensions the
    view's are, without those of one index; all and None if it shows no such region."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    spans: list[Span] = []
    offset = int(view.storage_offset())
    for stride in strides:
        start, offset = divmod(offset, stride)
        spans.append((start, start + 1))
    dims: list[int] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        dim = next((dim for dim, own in enumerate(strides) if own == stride and shape[dim] > 1), None)
        if dim is None or dim in dims or spans[dim][0] + size > shape[dim]:
            return Region.whole(shape), None
        spans[dim] = spans[dim][0], spans[dim][0] + size
        dims.append(dim)
    return Region.box(spans), dims
