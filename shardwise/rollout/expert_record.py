"""Records which experts the embedded engine routes tokens to, so that training can replay the routing.

Shapes: n tokens of a forward pass, M routers, k experts that each token goes to.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.config import ModelError
from shardwise.families import Router, UnreadableRouter, routers_of
from shardwise.rollout.skeleton import load_skeleton


class ExpertRecord:
    """Keeps the experts that every router chose in the latest forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        """
        Raises:
            ModelError: the model has no routers.
        """
        self._chosen: dict[int, Tensor] = {}
        """By the place of the router in the model; one may be called before those ahead of it (JetMoE's attention)."""
        self._routers = _routers_to_replay(model)
        for place, router in enumerate(self._routers):
            for module in router.modules:
                module.register_forward_hook(self._hook(router, place))

    def begin(self) -> None:
        """Forgets the previous forward pass."""
        self._chosen = {}

    def take(self) -> Tensor:
        """Returns the chosen experts, [n, M, k] int16, on the host."""
        return torch.stack([self._chosen[place] for place in range(len(self._routers))], dim=1).cpu()

    def _hook(self, router: Router, place: int) -> Callable[[nn.Module, Any, Any], None]:
        def after_router(_module: nn.Module, _args: Any, output: Any) -> None:
            try:
                experts = router.read(output)[1]
            except UnreadableRouter as error:
                raise ModelError(f"rollout.router_replay=true: {error}; set it to false for this model") from None
            self._chosen[place] = experts.to(torch.int16)

        return after_router


def require_routers(folder: Path) -> None:
    """Raises ModelError: the model that config.json of a folder names has no routers."""
    _routers_to_replay(load_skeleton(folder, torch.float32))


def _routers_to_replay(model: PreTrainedModel) -> list[Router]:
    if routers := routers_of(model):
        return routers
    raise ModelError(
        f"rollout.router_replay=true: {type(model).__name__} has no routers, so nothing to replay; remove it"
    )
