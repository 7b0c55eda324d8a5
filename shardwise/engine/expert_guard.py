"""Experts that are modules of their own are all called, in one order, on every rank, whatever its tokens chose.

Fused experts need nothing: an expert without tokens has a gradient of zeros. A separate one is not called where no
token chose it. Its FSDP unit is then not gathered on this rank, or its layer's unit reduces fewer gradients than on
others, and collectives of different experts meet: a hang, or numbers of another expert.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config import ConfigError, ModelError
from shardwise.engine.freeze import require_routers
from shardwise.engine.names import CONTAINERS
from shardwise.families import EXPERTS
from shardwise.ops import plain_name

KEY = "engine.apply_expert_patch"


def separate_experts(model: nn.Module) -> dict[str, list[str]]:
    """Path of each block -> those of its experts, by their place: the members of a list or dict called experts."""
    found = {}
    for path, module in model.named_modules():
        block, _, name = path.rpartition(".")
        if name == EXPERTS and isinstance(module, CONTAINERS):
            found[block] = [f"{path}.{member}" for member, _ in module.named_children()]
    return found


def check_experts(model: Any, *, is_patched: bool) -> None:
    """
    Args:
        model: a PreTrainedModel.
        is_patched: engine.apply_expert_patch.
    Raises:
        ConfigError: the key is set for a model without experts, or not set for one whose experts need it.
        ModelError: separate experts need more than hidden states, so that they cannot be called with no tokens.
    """
    separate = separate_experts(model)
    for experts in separate.values():
        for path in experts:
            _require_callable(path, model.get_submodule(path))
    if is_patched and not separate:
        require_routers(model, f"{KEY}=true")
    if separate and not is_patched:
        block, experts = next(iter(separate.items()))
        raise ConfigError(
            f"{block} of {type(model).__name__} has {len(experts)} experts that are modules of their own. A rank would "
            f"call only those that its tokens chose, and its collectives would not meet those of other ranks; set "
            f"{KEY}=true, which calls the others with no tokens"
        )


def _require_callable(path: str, expert: nn.Module) -> None:
    signature = inspect.signature(expert.forward)
    try:
        signature.bind(torch.empty(0))
    except TypeError:
        raise ModelError(
            f"{path} is a {type(expert).__name__}, whose forward takes {signature}; of experts that are modules of "
            "their own only those that need nothing but hidden states [tokens, hidden] are supported, for one that no "
            "token chose is called with none; give other arguments defaults, or use them in the block"
        ) from None


def guard_experts(model: nn.Module) -> None:
    """Puts hooks on separate experts and the blocks around them; none on fused ones. After sharding: FSDP gathers an
    expert in a hook that would otherwise run before those that call the experts in front of it."""
    for path, experts in separate_experts(model).items():
        guard = _Block(plain_name(path), [model.get_submodule(expert) for expert in experts])
        guard.attach(model.get_submodule(path))


class _Block:
    """Calls the experts that its block leaves out, with no tokens, where they stand among the others."""

    def __init__(self, path: str, experts: Sequence[nn.Module]) -> None:
        self._path = path
        self._experts = experts
        self._next = 0
        self._no_tokens = torch.empty(0)
        self._is_spare_call = False
        self._spare: list[Tensor] = []

    def attach(self, block: nn.Module) -> None:
        block.register_forward_pre_hook(self._begin, with_kwargs=True)
        for place, expert in enumerate(self._experts):
            expert.register_forward_pre_hook(partial(self._before, place), prepend=True)
        block.register_forward_hook(self._end)

    def _begin(self, _block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        hidden: Tensor = args[0] if args else next(iter(kwargs.values()))
        self._no_tokens = hidden.flatten(0, -2)[:0]
        self._next, self._spare = 0, []

    def _before(self, place: int, _expert: nn.Module, _args: Any) -> None:
        if self._is_spare_call:
            return
        if place < self._next:
            raise ModelError(
                f"{KEY}=true: {self._path} calls its expert {place} after its expert {self._next - 1}; only blocks "
                "that call their experts in order, each once, are supported"
            )
        self._call_spare_ones(until=place)
        self._next = place + 1

    def _end(self, _block: nn.Module, _args: Any, output: Any) -> Any:
        """Adds 0, so that the backward pass goes through every expert too."""
        self._call_spare_ones(until=len(self._experts))
        first = output[0] if isinstance(output, tuple) else output
        # Recomputation begins at the first saved tensor of a layer: here too before the gradient reaches an expert.
        zero = first.new_zeros(())
        for spare in self._spare:
            first = first + spare.sum() * zero
        self._spare = []
        return (first, *output[1:]) if isinstance(output, tuple) else first

    def _call_spare_ones(self, *, until: int) -> None:
        self._is_spare_call = True
        try:
            self._spare += [expert(self._no_tokens) for expert in self._experts[self._next : until]]
        finally:
            self._is_spare_call = False
        self._next = until
