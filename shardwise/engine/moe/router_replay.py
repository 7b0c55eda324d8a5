"""Router replay: in training, tokens go to the experts that they went to when they were sampled (Ma et al. 2025,
"Stabilizing MoE reinforcement learning by aligning training and inference routers").

A rounding may send a token to another expert in training than in the rollout, which changes its logprob by far more
than the rounding itself. With the rollout's choice only the weights of the experts are computed anew, with their
gradient.

Shapes: t tokens of this rank, M routers, E experts, k experts that each token goes to.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.config import ModelError
from shardwise.engine.moe.expert_loads import ExpertLoads
from shardwise.families import Router
from shardwise.types import Metrics, MetricValue


class RouterReplay:
    """Replaces what `topk` finds inside routers, while there are experts to replay; counts how often they differ."""

    def __init__(self, routers: Sequence[Router], loads: ExpertLoads) -> None:
        """
        Args:
            routers: hooks are put on them.
            loads: knows which routers cannot be read.
        """
        self._loads = loads
        self._experts: Tensor | None = None
        self._num_seen: dict[int, int] = {}
        self._compares = self._is_counting = False
        self._counts: Tensor | None = None
        self._choices: dict[int, _Replayed] = {}
        for place, router in enumerate(routers):
            for module in router.modules:
                module.register_forward_pre_hook(partial(self._before, place, router))
                # Also after an error, else a mode that was entered would stay active.
                module.register_forward_hook(partial(self._after, place, router), always_call=True)
        self._num_routers = len(routers)

    @contextmanager
    def replaying(self, experts: Tensor | None, *, counts: bool) -> Iterator[None]:
        """Replays experts in one micro-batch: its forward and, in training, its backward run inside this context.

        Args:
            experts: [t, M, k], -1 where a router chooses for itself; None replays nothing.
            counts: whether differing choices are counted, until `settle`.
        Raises:
            ModelError: on every rank, for all of them replay or none does (see `pack`): a router cannot be read, or the
                rollout had another number of them.
        """
        if experts is not None and self._loads.unreadable is not None:
            raise ModelError(f"rollout.router_replay=true: {self._loads.unreadable}; set it to false for this model")
        if experts is not None and experts.shape[1] != self._num_routers:
            raise ModelError(
                f"rollout.router_replay=true: the rollout tells the choices of {experts.shape[1]} routers, and the "
                f"model that is trained has {self._num_routers}; set it to false"
            )
        self._experts, self._num_seen = experts, {}
        self._compares = self._is_counting = counts
        try:
            yield
        finally:
            self._experts = None

    def settle(self) -> None:
        """Ends the counting, between forward and backward: what is recomputed then was counted already."""
        self._is_counting = False

    def take(self) -> Metrics:
        """Collective. Returns the share of chosen experts that the rollout did not choose, in the micro-batches of all
        ranks since the last call; nothing if none was replayed."""
        if self._counts is None:
            return {}
        dist.all_reduce(self._counts)
        differing, total = self._counts.tolist()
        self._counts = None
        return {"train/router/replay_mismatch": MetricValue.mean(differing, total)}

    def clear(self) -> None:
        """Forgets what was counted."""
        self._counts = None

    @torch.compiler.disable
    def _before(self, place: int, router: Router, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self._experts is None:
            return
        start, num_tokens = self._num_seen.get(place, 0), args[0].shape[:-1].numel()
        self._num_seen[place] = (start + num_tokens) % len(self._experts)  # a tiled MLP brings the next tokens
        experts = self._experts[start : start + num_tokens, place].long()
        if self._compares:  # also in recomputation: selective checkpointing needs the same operations
            differing = self._compare(router, module, args, experts)
            if self._is_counting:
                self._counts = differing if self._counts is None else self._counts + differing
        choice = _Replayed(experts, _num_experts(router))
        choice.__enter__()
        self._choices[place] = choice

    @torch.compiler.disable
    def _after(self, place: int, router: Router, _module: nn.Module, _args: Any, output: Any) -> None:
        choice = self._choices.pop(place, None)
        if choice is None:
            return
        choice.__exit__(None, None, None)
        if output is None:
            return  # it raised
        if not choice.is_made:
            raise ModelError(
                f"rollout.router_replay=true: {router.kind} does not choose experts by topk over all "
                "of them, so its choice cannot be replaced; set it to false for this model"
            )

    @torch.no_grad()
    def _compare(self, router: Router, module: nn.Module, args: tuple[Tensor, ...], experts: Tensor) -> Tensor:
        """Returns [2] float64: how many of the experts [t, k] that the router chooses by itself are not replayed, and
        how many were compared. This calls the router once more: while it is made to prefer the groups of replayed
        experts, nothing tells what it would have chosen."""
        own = router.read(module.forward(*args))[1]
        is_given = experts[:, :1] >= 0
        is_same = (own[:, :, None] == experts[:, None, :]).any(-1)
        return torch.stack([(is_given & ~is_same).sum(), is_given.expand_as(experts).sum()]).double()


class _Replayed(TorchFunctionMode):
    """Inside this mode `topk` over all experts gives the replayed ones, with the scores that they have now; over groups
    of experts it prefers the groups of the replayed ones, because the scores of other groups are masked."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        super().__init__()
        self._experts = experts
        self._num_experts = num_experts
        self.is_made = False
        """Whether a choice was replaced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores = args[0] if args else kwargs["input"]
        is_given = self._experts[:, :1] >= 0
        if scores.dim() != 2 or self._num_experts % scores.shape[1]:
            return found  # a choice among the experts of each group
        if scores.shape[1] < self._num_experts:
            groups = self._experts.clamp(min=0) // (self._num_experts // scores.shape[1])
            is_preferred = torch.zeros_like(scores, dtype=torch.bool).scatter(1, groups, is_given.expand_as(groups))
            chosen = scores.masked_fill(is_preferred, torch.inf).topk(found.indices.shape[1], dim=-1).indices
            return torch.return_types.topk((scores.gather(-1, chosen), chosen))
        experts = torch.where(is_given, self._experts, found.indices)
        self.is_made = True
        return torch.return_types.topk((scores.gather(-1, experts), experts))


def _num_experts(router: Router) -> int:
    if router.num_experts is not None:
        return router.num_experts
    raise ModelError(
        f"rollout.router_replay=true: {router.kind} does not say in num_experts how many it has; set "
        "it to false for this model"
    )
