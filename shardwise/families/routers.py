"""The routers of a mixture of experts: which modules they are and how to read their outputs. Also fused experts whose
shape decides how they are computed.

Shapes: t tokens, E experts, k experts that each token goes to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.families.support import FOR_IMAGES_ALONE
from shardwise.ops.wrappers import name_without_copies, plain_name

EXPERTS = "experts"
"""The name that families give the experts of a block."""
ROUTER_NAMES = ("gate", "router")
"""The names that families give the module beside the experts that chooses among them."""
GIVES_PROBABILITIES = {"Gemma4TextRouter"}
"""Classes of routers that give, and that transformers records, the softmax of their logits."""


ROW_BYTES = 16
"""torch.grouped_mm reads only matrices whose rows are a multiple of this many bytes."""


def avoid_unaligned(model: Any, dtype: torch.dtype) -> None:
    """Makes a model compute fused experts one after the other if grouped_mm cannot read them in this dtype."""
    if unaligned_expert(model, dtype) is not None:
        model.set_experts_implementation("eager")


def unaligned_expert(model: Any, dtype: torch.dtype) -> str | None:
    """Returns the name of the first weight of fused experts that grouped_mm cannot read, because its rows in this dtype
    are not a multiple of 16 bytes. None if there is none, or if experts are not computed by grouped_mm."""
    if model.config.get_text_config()._experts_implementation != "grouped_mm":
        return None
    names = {plain_name(name): parameter for name, parameter in model.named_parameters() if parameter.dim() == 3}
    fused = {name: parameter for name, parameter in names.items() if EXPERTS in name.split(".")}
    return next((name for name, weight in fused.items() if weight.shape[-1] * dtype.itemsize % ROW_BYTES), None)


class UnreadableRouter(Exception):
    """A router's output does not tell its logits or which experts it chooses."""


@dataclass(frozen=True, slots=True)
class Router:
    """A module that chooses experts for tokens.

    Example: for Qwen3-MoE `Router("model.layers.0.mlp.gate", (module,), logits_index=0)`, whose module returns
    (logits, weights, experts).
    """

    path: str
    modules: tuple[nn.Module, ...]
    """One module; or the frozen one and the copy that peft trains, only one of which runs."""
    logits_index: int = 0
    """Index of the logits among the module's outputs, if it has several."""
    num_chosen: int | None = None
    """k, needed for a router that does not return the experts it chooses."""

    @property
    def kind(self) -> str:
        """The name of the module's class."""
        return type(self.modules[0]).__name__

    @property
    def num_experts(self) -> int | None:
        """E, as the module or its config says it; None where neither does."""
        module = self.modules[0]
        return _number(["num_experts"], module, getattr(module, "config", None))

    def read(self, output: Any) -> tuple[Tensor, Tensor]:
        """Reads a router's output: (logits [t, E] with their graph, experts [t, k] int64). Of a router that returns
        probabilities the logits are their logarithms. One that returns no experts is taken to choose those with the
        largest logits.

        Raises:
            UnreadableRouter: the router returns no logits, or nothing says how many experts it chooses.
        """
        parts = output if isinstance(output, tuple) else (output,)
        logits = self._logits(parts).flatten(0, -2)
        if self.kind in GIVES_PROBABILITIES:
            logits = logits.clamp(min=torch.finfo(logits.dtype).tiny).log()
        for part in parts:
            if isinstance(part, Tensor) and part.dtype == torch.int64 and part.shape[:-1] == logits.shape[:1]:
                return logits, part
        if self.num_chosen is None:
            raise UnreadableRouter(
                f"{self.path} cannot be read: {self.kind} neither gives the experts that it chooses "
                "nor says in top_k how many they are"
            )
        return logits, logits.detach().topk(self.num_chosen, dim=-1).indices

    def replace(self, output: Any, place: int, tensor: Tensor) -> Any:
        """Returns the output with its tensor at `place` replaced."""
        return tensor if not isinstance(output, tuple) else (*output[:place], tensor, *output[place + 1 :])

    def carrier(self, output: Any) -> tuple[int, Tensor]:
        """Returns (place, tensor) of the output that depends on the logits and that the block continues with: the
        weights of the experts, or the logits themselves."""
        parts = output if isinstance(output, tuple) else (output,)
        logits = self._logits(parts)
        for place, part in enumerate(parts):
            if isinstance(part, Tensor) and part.is_floating_point() and part is not logits:
                return place, part
        return (self.logits_index if isinstance(output, tuple) else 0), logits

    def _logits(self, parts: tuple[Any, ...]) -> Tensor:
        logits = parts[self.logits_index if len(parts) > 1 else 0]
        if isinstance(logits, Tensor) and logits.is_floating_point():
            return logits
        raise UnreadableRouter(f"{self.path} cannot be read: {self.kind} does not give its logits")


def routers_of(model: Any) -> list[Router]:
    """Returns the routers of a transformers model, in the order of its modules; none for a dense one.

    Routers are the modules whose router logits transformers records. A model that declares none, and a block that is
    recorded as a whole, are searched for modules called gate or router beside one called experts.
    """
    recorded = _recorded_classes(model)
    named = [
        Router(f"{path}.{name}", (part,), num_chosen=_num_chosen(part, module, model.config))
        for path, module in model.named_modules()
        for name, part in module.named_children()
        if name in ROUTER_NAMES and EXPERTS in dict(module.named_children())
    ]
    found = [
        Router(path, (module,), index, _num_chosen(module))
        for path, module in model.named_modules()
        for target, index in recorded.items()
        if isinstance(module, target)
    ]
    # For ERNIE 4.5 VL transformers records the block around two routers, one of them for images alone.
    found += [one for one in named if not recorded or any(one.path.startswith(f"{other.path}.") for other in found)]
    found = [one for one in found if FOR_IMAGES_ALONE.isdisjoint(one.path.split("."))]
    # For JetMoe it also records an attention, which has a router inside.
    found = [one for one in found if not any(other.path.startswith(f"{one.path}.") for other in found)]
    by_path: dict[str, Router] = {}
    for one in found:
        path = name_without_copies(one.path)
        before = by_path[path].modules if path in by_path else ()
        by_path[path] = replace(one, path=path, modules=before + one.modules)
    return list(by_path.values())


def _recorded_classes(model: Any) -> dict[type[nn.Module], int]:
    """Class of a router -> place of the logits among its outputs, as the parts of the model declare it."""
    found = {}
    for part in model.modules():
        declared = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", [])
        for one in declared if isinstance(declared, list) else [declared]:
            target, place = (one, 1) if isinstance(one, type) else (one.target_class, one.index)
            if isinstance(target, type):  # some are given by name
                found[target] = place
    return found


def _num_chosen(*holders: Any) -> int | None:
    """k, under the names that families give it, from the first holder (router, block, config) that has it."""
    return _number(["top_k", "num_experts_per_tok"], *holders)


def _number(names: Sequence[str], *holders: Any) -> int | None:
    """The number that the first of `holders` to have one has under one of these names."""
    known = (getattr(holder, name, None) for holder in holders for name in names)
    return next((number for number in known if isinstance(number, int)), None)
