"""AdamW where torch's own does not fit: bfloat16 masters, and states in host memory.

Both process a shard in flat slices of a bounded size, so that they need little memory beyond weights, gradients and
states. Adam is elementwise, so slices do not change a number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from shardwise.engine.optim.stochastic_rounding import random_low_bits, round_stochastically, rounding_key
from shardwise.engine.shards import RowSharding, local_shard

SLICE_ELEMENTS = 1 << 24


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW on bfloat16 weights: computed in float32, the new weights rounded stochastically.

    Both moments are float32. In bfloat16 the second one would stall: with beta2 = 0.999 a step changes it by less than
    half of its last bit. Weights, gradients and states then take 12 bytes for each element, instead of 16.
    The random bits belong to (seed, update, parameter, element): runs repeat, replicas stay equal, and the numbers do
    not depend on the number of ranks, nor on which of them share experts.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        names: Mapping[int, str],
        betas: tuple[float, float],
        eps: float,
        fused: bool,
        seed: int,
    ) -> None:
        """
        Args:
            groups: each with params (bfloat16, plain or sharded on dim 0), lr and weight_decay.
            names: id of each parameter -> its name, which selects the random bits together with the seed and the
                update.
            fused: True uses torch's fused kernel, False foreach.
            seed: seeds the rounding.
        """
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "betas": betas, "eps": eps})
        self.num_updates = 0
        """Updates so far, each of all parameters."""
        self._names = names
        self._fused = fused
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    key = rounding_key(self._seed, self.num_updates, self._names[id(parameter)])
                    self._update(parameter, group, key)
        self.num_updates += 1

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], key: int) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        shard = local_shard(parameter)
        if not state:
            state["step"] = torch.zeros((), device=shard.device if self._fused else "cpu")
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        moments = local_shard(state["exp_avg"]).view(-1), local_shard(state["exp_avg_sq"]).view(-1)
        weights, gradient = shard.view(-1), local_shard(parameter.grad).reshape(-1)
        first = RowSharding.of(parameter).first_element(parameter.shape)
        for part in _slices(weights.numel()):
            exact = weights[part].float()
            parts = [moment[part] for moment in moments]
            _adamw(exact, gradient[part].float(), parts, state["step"], group, fused=self._fused)
            bits = random_low_bits(key, first + part.start, exact.numel(), exact.device)
            weights[part] = round_stochastically(exact, bits)
        state["step"] += 1


class HostAdamW(torch.optim.Optimizer):
    """AdamW whose moments live in host memory and whose update is computed there, by torch's fused CPU kernel.

    Weights and gradients of an accelerator cross slice by slice through pinned memory, the next slice while this one is
    computed, and the new weights go back without waiting. The moments never cross, so they are ordinary memory.
    The device keeps no state at all; a step costs 12 bytes over the bus for each float32 element of the shard.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        """
        Args:
            groups: each with params (float32, plain or sharded on dim 0, on any device), lr and weight_decay.
        """
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            fetched = None
            for next_fetched in map(_fetch, self._work(group)):
                if fetched is not None:
                    _compute(fetched, group)
                fetched = next_fetched
            if fetched is not None:
                _compute(fetched, group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["step"] += 1

    def _work(self, group: dict[str, Any]) -> Iterator["_Slice"]:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            shard = local_shard(parameter)
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros(shard.shape, dtype=shard.dtype)
            weights, gradient = shard.view(-1), local_shard(parameter.grad).reshape(-1)
            moments = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
            for part in _slices(weights.numel()):
                yield _Slice(weights[part], gradient[part], [moment[part] for moment in moments], state["step"])


@dataclass(frozen=True, slots=True)
class _Slice:
    weights: Tensor
    """On the parameter's device, like the gradient."""
    gradient: Tensor
    moments: list[Tensor]
    """On the host."""
    step: Tensor


@dataclass(frozen=True, slots=True)
class _Fetched:
    slice: _Slice
    weights: Tensor
    """On the host, like the gradient, once `arrived`."""
    gradient: Tensor
    arrived: torch.Event | None
    """None: the slice is in host memory anyway."""


def _fetch(part: _Slice) -> _Fetched:
    """Starts to copy a slice to the host; what is there already is taken as it is."""
    if part.weights.device.type == "cpu":
        return _Fetched(part, part.weights, part.gradient, None)
    weights, gradient = (torch.empty_like(t, device="cpu", pin_memory=True) for t in (part.weights, part.gradient))
    weights.copy_(part.weights, non_blocking=True)
    gradient.copy_(part.gradient, non_blocking=True)
    arrived = torch.Event(part.weights.device)
    arrived.record()
    return _Fetched(part, weights, gradient, arrived)


def _compute(fetched: _Fetched, group: dict[str, Any]) -> None:
    """Waits for the copy of a slice, updates it on the host and starts to copy it back."""
    if fetched.arrived is not None:
        fetched.arrived.synchronize()
    part = fetched.slice
    _adamw(fetched.weights, fetched.gradient, part.moments, part.step, group, fused=True)
    if fetched.arrived is not None:
        part.weights.copy_(fetched.weights, non_blocking=True)


def _adamw(
    weights: Tensor, gradient: Tensor, moments: list[Tensor], step: Tensor, group: dict[str, Any], *, fused: bool
) -> None:
    """torch's AdamW on one slice. The step counter is copied: it advances once for all slices of a parameter."""
    beta1, beta2 = group["betas"]
    exp_avg, exp_avg_sq = moments
    adamw(
        [weights],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step.clone()],
        fused=fused,
        foreach=not fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _slices(num_elements: int) -> Iterator[slice]:
    for start in range(0, num_elements, SLICE_ELEMENTS):
        yield slice(start, min(num_elements, start + SLICE_ELEMENTS))
