"""The routers of a mixture of experts: which modules they are, and what they say. And fused experts, where how they are
computed depends on their shape.

Shapes: t tokens, E experts, k experts that each token goes to.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.families.support import FOR_IMAGES_ALONE
from shardwise.ops.wrappers import name_without_copies, plain_name

EXPERTS = "experts"
"""What families call the experts of a block."""
ROUTER_NAMES = ("gate", "router")
"""What families call the module beside them that chooses."""


ROW_BYTES = 16
"""torch.grouped_mm reads matrices whose rows are a multiple of so many bytes."""


def avoid_unaligned(model: Any, dtype: torch.dtype) -> None:
    """Has fused experts computed one after the other where grouped_mm cannot read them in this dtype."""
    if unaligned_expert(model, dtype) is not None:
        model.set_experts_implementation("eager")


def unaligned_expert(model: Any, dtype: torch.dtype) -> str | None:
    """The first weight of fused experts whose rows grouped_mm cannot read: their length in this dtype is no multiple of
    16 bytes. None where there is none, or experts are computed in another way."""
    if model.config.get_text_config()._experts_implementation != "grouped_mm":
        return None
    names = {plain_name(name): parameter for name, parameter in model.named_parameters() if parameter.dim() == 3}
    fused = {name: parameter for name, parameter in names.items() if EXPERTS in name.split(".")}
    return next((name for name, weight in fused.items() if weight.shape[-1] * dtype.itemsize % ROW_BYTES), None)


class UnreadableRouter(Exception):
    """What comes out of it does not say which experts it chooses, or why."""


@dataclass(frozen=True, slots=True)
class Router:
    """A module that chooses experts for tokens.

    Example: of Qwen3-MoE `Router("model.layers.0.mlp.gate", (module,), logits_index=0)`, whose module gives
    (logits, weights, experts).
    """

    path: str
    modules: tuple[nn.Module, ...]
    """One; or the frozen one and a copy that peft trains, of which either runs."""
    logits_index: int = 0
    """Of the logits among its outputs, if they are several."""
    num_chosen: int | None = None
    """k of a router that does not give the experts that it chooses."""

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.modules[0]).__name__

    def read(self, output: Any) -> tuple[Tensor, Tensor]:
        """(logits [t, E] with their graph, experts [t, k] int64). A router that gives no experts chooses the largest
        logits.

        Raises:
            UnreadableRouter: it gives no logits, or nothing says how many experts it chooses.
        """
        parts = output if isinstance(output, tuple) else (output,)
        logits = self._logits(parts).flatten(0, -2)
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
        """The output with another tensor at `place`."""
        return tensor if not isinstance(output, tuple) else (*output[:place], tensor, *output[place + 1 :])

    def carrier(self, output: Any) -> tuple[int, Tensor]:
        """(place, tensor) of what the block goes on with of the outputs that depend on the logits: the weights of the
        experts, or the logits themselves."""
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
    """Those of a transformers model, in the order of its modules; none in a dense one.

    They are what transformers records router logits of. A model that says nothing about that, and a block that is
    recorded whole, are looked through for modules called gate or router beside one called experts.
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
    # Of ERNIE 4.5 VL transformers records the block around two routers, one of them for images alone.
    found += [one for one in named if not recorded or any(one.path.startswith(f"{other.path}.") for other in found)]
    found = [one for one in found if FOR_IMAGES_ALONE.isdisjoint(one.path.split("."))]
    # Of JetMoe it records an attention too, which has a router inside.
    found = [one for one in found if not any(other.path.startswith(f"{one.path}.") for other in found)]
    by_path: dict[str, Router] = {}
    for one in found:
        path = name_without_copies(one.path)
        before = by_path[path].modules if path in by_path else ()
        by_path[path] = replace(one, path=path, modules=before + one.modules)
    return list(by_path.values())


def _recorded_classes(model: Any) -> dict[type[nn.Module], int]:
    """Class -> place of the logits among its outputs, as the models that it consists of declare them."""
    found = {}
    for part in model.modules():
        declared = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", [])
        for one in declared if isinstance(declared, list) else [declared]:
            target, place = (one, 1) if isinstance(one, type) else (one.target_class, one.index)
            if isinstance(target, type):  # some are given by name
                found[target] = place
    return found


def _num_chosen(*holders: Any) -> int | None:
    """Under the names that families have for it, from the first of a router, its block and the config that knows it."""
    known = (getattr(holder, name, None) for holder in holders for name in ("top_k", "num_experts_per_tok"))
    return next((number for number in known if isinstance(number, int)), None)
