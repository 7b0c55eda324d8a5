"""Records what every module of a model takes and returns, to compare two implementations of a model."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn


class Place(NamedTuple):
    """The input or the output of a module."""

    module: str
    side: Literal["input", "output"]

    def __str__(self) -> str:
        return f"the {self.side} of {self.module}"


class ModuleTrace:
    """The tensors that went through a model, on the host, in the order in which each place was first reached."""

    def __init__(self) -> None:
        self._parts: dict[Place, list[Tensor]] = {}

    def note(self, place: Place, value: Any) -> None:
        """Keeps a copy of the first floating-point tensor in what a module was given or returned."""
        tensor = next((one for one in _flat(value) if one.is_floating_point()), None)
        if tensor is not None:
            self._parts.setdefault(place, []).append(tensor.detach().to("cpu", copy=True))

    def of_passes(self, lengths: Sequence[int]) -> dict[Place, Tensor]:
        """Returns what every place saw for each position of one sequence that went through the model in passes of these
        lengths: [sum(lengths), n] float32.

        Leaves out places that were not reached once in each pass, or did not see the same number of values for every
        position, such as one of several experts.
        """
        found = {place: _by_position(parts, lengths) for place, parts in self._parts.items()}
        return {place: values for place, values in found.items() if values is not None}


Reader = Callable[[nn.Module, Any], Any]


def _as_it_is(_: nn.Module, value: Any) -> Any:
    return value


@contextmanager
def traced(
    modules: Iterable[tuple[str, nn.Module]], *, read_input: Reader = _as_it_is, read_output: Reader = _as_it_is
) -> Iterator[ModuleTrace]:
    """Inside this context, keeps every tensor that goes into or comes out of these modules, waiting for the device each
    time. Compiled modules are computed operation by operation.

    Leaves out the root, which has no name, and modules within fused experts, which sort tokens by expert.

    Args:
        modules: (name in the trace, module).
        read_input: maps a module and its arguments to what is kept as its input; None keeps nothing.
        read_output: maps a module and its return value to what is kept as its output.
    """
    trace = ModuleTrace()
    named = {name: module for name, module in modules if name}
    fused = tuple(f"{name}." for name, module in named.items() if _has_fused_weights(module))

    def note_input(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.note(Place(name, "input"), read_input(module, [*args, *kwargs.values()]))

    def note_output(name: str, module: nn.Module, _: tuple[Any, ...], value: Any) -> None:
        trace.note(Place(name, "output"), read_output(module, value))

    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in named.items():
            if not name.startswith(fused):
                stack.callback(module.register_forward_pre_hook(partial(note_input, name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(partial(note_output, name)).remove)
        yield trace


def _by_position(parts: Sequence[Tensor], lengths: Sequence[int]) -> Tensor | None:
    """Joins the parts of all passes as [positions, n] float32; None if they do not fit. Positions lie along the first
    axis, indexed from the end, that has the length of the pass in every part."""
    if len(parts) != len(lengths):
        return None
    for axis in range(-max(part.dim() for part in parts), 0):
        if all(-axis <= part.dim() and part.shape[axis] == n for part, n in zip(parts, lengths, strict=True)):
            rows = [part.movedim(axis, 0).reshape(n, -1).float() for part, n in zip(parts, lengths, strict=True)]
            return torch.cat(rows) if len({row.shape[1] for row in rows}) == 1 else None
    return None


def _has_fused_weights(module: nn.Module) -> bool:
    return any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _flat(one)
