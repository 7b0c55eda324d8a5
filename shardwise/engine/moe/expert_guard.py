"""Makes every rank call all experts that are modules and FSDP units of their own, in one order, whatever its tokens
chose.

Fused experts do not need this, nor do separate ones in the unit of their layer: without tokens they have a gradient of
zeros, the former from their kernel, the latter from FSDP (wrap.py). But a unit that no token chose would not be called,
so it would not be gathered on this rank, and the collectives of different experts would meet: a hang, or numbers of
another expert.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.config import ConfigError, ModelError
from shardwise.engine.freeze import require_routers
from shardwise.engine.names import CONTAINERS, has_parameters, is_within
from shardwise.engine.wrap import Units
from shardwise.families import EXPERTS

KEY = "engine.apply_expert_patch"
_NUMBERED = re.compile(r"(.*?)\d+")


def expert_guards(model: PreTrainedModel, units: Units, *, is_patched: bool) -> "list[ExpertGuard]":
    """Returns a guard for every block whose separate experts are units. To be called before anything is wrapped.

    Args:
        is_patched: engine.apply_expert_patch.
    Raises:
        ConfigError: the key is set for a model without experts, or not set for one whose experts need it.
        ModelError: such experts need more than hidden states, so that they cannot be called with no tokens.
    """
    separate = _separate_experts(model, units)
    if is_patched and not separate:
        require_routers(model, f"{KEY}=true")
    guards = [
        ExpertGuard(block, model.get_submodule(block), experts)
        for block, experts in separate
        if any(is_within(unit, path) for unit in units.inner for path in experts)
    ]
    if guards and not is_patched:
        raise ConfigError(
            f"{guards[0].path} of {type(model).__name__} has {guards[0].num_experts} experts that are modules and FSDP "
            "units of their own (engine.wrap_policy.moe_experts or engine.module_precision). A rank would gather only "
            f"those that its tokens chose, and its collectives would not meet those of other ranks; set {KEY}=true, "
            "which calls the others with no tokens, or make no units of them"
        )
    return guards


def _separate_experts(model: PreTrainedModel, units: Units) -> list[tuple[str, dict[str, nn.Module]]]:
    """Returns (path of the block, its experts by path, in their order) for every block inside a layer.

    Experts are the members of a list or dict called experts. Under any other name, or as numbered attributes, modules
    of one class are experts if moe_experts names their class, or if they have matrices and the block has another matrix
    that gives each of them a number (a router).
    """
    found = []
    for layer in units.layers:
        for path, module in model.get_submodule(layer).named_modules(prefix=layer):
            is_container = isinstance(module, CONTAINERS)
            block = path.rpartition(".")[0] if is_container else path
            for group in _groups(module):
                experts = {f"{path}.{name}": member for name, member in group.items()}
                is_named = is_container and path.rpartition(".")[2] == EXPERTS
                has_named_class = any(expert in units.experts for expert in experts)
                if is_named or (
                    _are_alike(group) and (has_named_class or _is_chosen(model.get_submodule(block), group))
                ):
                    found.append((block, experts))
    return found


def _groups(module: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """Yields the members of a list or dict; for another module, every group of children whose names differ only in a
    number."""
    children = dict(module.named_children())
    if isinstance(module, CONTAINERS):
        yield children
        return
    stems = {name: match[1] for name in children if (match := _NUMBERED.fullmatch(name))}
    for stem in dict.fromkeys(stems.values()):
        yield {name: children[name] for name in stems if stems[name] == stem}


def _are_alike(group: Mapping[str, nn.Module]) -> bool:
    members = list(group.values())
    return len(members) > 1 and len({type(one) for one in members}) == 1 and all(map(has_parameters, members))


def _is_chosen(block: nn.Module, group: Mapping[str, nn.Module]) -> bool:
    """Whether the members have matrices (norms have none) and the block has another matrix with one dimension of their
    number."""
    own = {id(parameter) for member in group.values() for parameter in member.parameters()}
    others = [parameter for parameter in block.parameters() if id(parameter) not in own and parameter.dim() == 2]
    have_matrices = all(any(parameter.dim() > 1 for parameter in member.parameters()) for member in group.values())
    return have_matrices and any(len(group) in parameter.shape for parameter in others)


class ExpertGuard:
    """Calls the experts that their block leaves out, with no tokens, at their place in the order of all experts."""

    def __init__(self, path: str, block: nn.Module, experts: Mapping[str, nn.Module]) -> None:
        """Raises ModelError: an expert cannot be called with hidden states alone."""
        self.path = path
        self._block = block
        self._paths, self._experts = list(experts), list(experts.values())
        self._next = 0
        self._no_tokens = torch.empty(0)
        self._is_spare_call = False
        self._spare: list[Tensor] = []
        for at, expert in experts.items():
            _require_callable(at, expert)

    @property
    def num_experts(self) -> int:
        return len(self._experts)

    def attach(self) -> None:
        """Puts hooks on experts and block. To be called after sharding: FSDP gathers an expert in a hook that would
        otherwise run before the hook that calls the experts in front of it."""
        self._block.register_forward_pre_hook(self._begin, with_kwargs=True)
        for place, expert in enumerate(self._experts):
            expert.register_forward_pre_hook(partial(self._before, place), prepend=True)
        self._block.register_forward_hook(self._end, prepend=True)  # a block may be a layer, which is a unit

    @torch.compiler.disable
    def _begin(self, _block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        hidden: Tensor = args[0] if args else next(iter(kwargs.values()))
        self._no_tokens = hidden.flatten(0, -2)[:0]
        self._next, self._spare = 0, []

    @torch.compiler.disable
    def _before(self, place: int, _expert: nn.Module, _args: Any) -> None:
        if self._is_spare_call:
            return
        if place < self._next:
            raise ModelError(
                f"{KEY}=true: {self.path} calls its expert {place} after its expert {self._next - 1}; only blocks "
                "that call their experts in order, each once, are supported"
            )
        self._call_spare_ones(until=place)
        self._next = place + 1

    @torch.compiler.disable
    def _end(self, _block: nn.Module, _args: Any, output: Any) -> Any:
        """Calls the remaining experts and adds their outputs times 0, so that the backward pass goes through every
        expert too."""
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
            self._spare += [self._call_with_no_tokens(place) for place in range(self._next, until)]
        finally:
            self._is_spare_call = False
        self._next = until

    def _call_with_no_tokens(self, place: int) -> Tensor:
        output = self._experts[place](self._no_tokens)
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, Tensor):
            raise ModelError(
                f"{KEY}=true: {self._paths[place]} ({type(self._experts[place]).__name__}) gives "
                f"{type(output).__name__}; only experts that give their hidden states [tokens, hidden], alone or as "
                "the first of a tuple, are supported"
            )
        return first


def _require_callable(path: str, expert: nn.Module) -> None:
    signature = inspect.signature(expert.forward)
    try:
        signature.bind(torch.empty(0))
    except TypeError:
        raise ModelError(
            f"{path} is a {type(expert).__name__}, whose forward takes {signature}; of experts that are modules and "
            "FSDP units of their own only those that need nothing but hidden states [tokens, hidden] are supported, "
            "for one that no token chose is called with none; give other arguments defaults, use them in the block, or "
            "make no units of them"
        ) from None
