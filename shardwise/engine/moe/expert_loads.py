"""How evenly the routers of a mixture of experts spread tokens over experts, and the loss that evens it out.

Both look at training passes only, leave out padding, and count no token twice where a layer is recomputed. Hooks stay
on the routers for good (a compiled layer ignores hooks that are added later) and wait for nothing: counts stay on the
device until the optimizer step, which sums them over ranks in one collective.

Shapes: M routers, E experts, k experts that each token goes to, t tokens of this rank, S sequences of a pack.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.console import warn
from shardwise.engine.token_slice import TokenSlice
from shardwise.engine.ulysses import Ulysses
from shardwise.families import Router, UnreadableRouter
from shardwise.types import Metrics, MetricValue, TokenBatch
from shardwise.uploads import to_device

Detail = Literal["summary", "layers", "experts"]
"""How much is reported: on all routers together, on each of them, on each expert."""


class ExpertLoads:
    """Counts which experts the tokens of an optimizer step go to, and adds the auxiliary loss to its gradients.

    The loss of a sequence of T tokens is E sum_i f_i P_i, f_i the share of its tokens that go to expert i (together
    they add up to k), P_i the mean of softmax(logits)_i over its tokens: k where the load is even, up to E. It is
    averaged over routers, and over the sequences that are trained.

    This is transformers' `load_balancing_loss_func` (Fedus et al. 2021, equations 4 to 6) of one sequence and one
    router. Over a whole micro-batch, as there, the product of two means changes with the split into micro-batches and
    ranks. Over a sequence it does not (so DeepSeek-V3's balance loss, equations 17 to 20, whose P_i is of normalized
    sigmoid scores and whose f_i is divided by k).
    """

    def __init__(
        self, routers: Sequence[Router], *, aux_loss_coef: float, detail: Detail, ulysses: Ulysses | None
    ) -> None:
        """
        Args:
            routers: hooks are put on them.
            aux_loss_coef: what the loss is multiplied by; 0 leaves it out.
            ulysses: sums counts over the ranks that share sequences.
        """
        self._routers = routers
        self._aux_loss_coef = aux_loss_coef
        self._detail = detail
        self._ulysses = ulysses
        self._pass: _Pass | None = None
        self._is_probing = False
        self._error: UnreadableRouter | None = None
        self._loads: dict[int, Tensor] = {}
        self._aux_losses: dict[int, Tensor] = {}
        for place, router in enumerate(routers):
            for module in router.modules:
                module.register_forward_hook(self._hook(place, router))

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Inside this context a forward pass shows whether all routers can be read; nothing is counted. If one cannot,
        and nothing that was asked for depends on it, nothing is counted later either, and rank 0 warns.

        Raises:
            UnreadableRouter: a router cannot be read, and there is an auxiliary loss or more than the summary is
                wanted.
        """
        self._is_probing = True
        try:
            yield
        finally:
            self._is_probing = False
        if self._error is None:
            return
        if self._aux_loss_coef > 0 or self._detail != "summary":
            raise self._error
        self._routers = []
        if dist.get_rank() == 0:
            warn(f"{self.unreadable}; there will be no metrics train/router/ of the load of experts")

    @property
    def unreadable(self) -> str | None:
        """The first router that cannot be read, and why; None where all can, as far as `probing` has found. The same on
        every rank."""
        return None if self._error is None else str(self._error)

    @contextmanager
    def watching(
        self, batch: TokenBatch, tokens: TokenSlice, *, num_sequences: int, loss_scale: float
    ) -> Iterator[None]:
        """Counts one micro-batch: its forward, `settle`, and its backward run inside this context.

        Args:
            tokens: this rank's part of `batch`.
            num_sequences: number of trained sequences in the whole optimizer step.
            loss_scale: what gradients are multiplied by.
        """
        if self._routers:
            by_sequence = self._aux_loss_coef > 0
            self._pass = _Pass(
                rows=_rows(batch, tokens, by_sequence=by_sequence),
                weights=_weights(batch, tokens) / max(1, num_sequences) / len(self._routers),
                num_rows=len(batch.cu_seqlens) if by_sequence else 2,
                gradient_factor=self._aux_loss_coef * loss_scale,
            )
        try:
            yield
        finally:
            self._pass = None

    def settle(self) -> None:
        """Ends the counting, between forward and backward. Collective over the ranks that share sequences, if there is
        an auxiliary loss."""
        if self._pass is None:
            return
        self._pass.is_counting = False
        for place, counts in self._pass.counts.items():
            _add(self._loads, place, counts[:-1].sum(0))
        if self._aux_loss_coef > 0:
            if self._ulysses is not None:
                self._pass.sum_counts(self._ulysses)
            for place, loss in self._pass.losses():
                _add(self._aux_losses, place, loss)

    def take(self) -> Metrics:
        """Collective. Returns on rank 0, for the micro-batches of all ranks since the last call, how far the load is
        from even, and the auxiliary loss without its coefficient; nothing on the others, since they would send as much
        of the same. The means are over nothing if no router saw a token."""
        if not self._loads:
            return {}
        places = sorted(self._loads)
        sizes = [len(self._loads[place]) for place in places]
        parts = [self._loads[place].double() for place in places]
        parts += [self._aux_losses[place].double()[None] for place in places if place in self._aux_losses]
        flat = torch.cat(parts)
        dist.all_reduce(flat)
        self.clear()
        if dist.get_rank() > 0:
            return {}
        loads, losses = flat.split([sum(sizes), len(flat) - sum(sizes)])
        metrics = self._load_metrics(
            {
                self._routers[place].path: one.tolist()
                for place, one in zip(places, loads.cpu().split(sizes), strict=True)
            }
        )
        if self._aux_loss_coef > 0:
            metrics["train/router/aux_loss"] = MetricValue.mean(float(losses.sum()), 1)
        return metrics

    def clear(self) -> None:
        """Forgets what was counted."""
        self._loads, self._aux_losses = {}, {}

    def _load_metrics(self, loads: dict[str, list[float]]) -> Metrics:
        """Metrics from the [E] counts of each router. A violation is the largest load of a layer over its mean load,
        minus 1 (Wang et al. 2024, auxiliary-loss-free load balancing); a dead expert is one without a token."""
        means = {path: sum(counts) / len(counts) for path, counts in loads.items()}
        seen = any(means.values())
        violations = {path: max(counts) / means[path] - 1 if means[path] else 0.0 for path, counts in loads.items()}
        dead = {path: sum(not count for count in counts) for path, counts in loads.items()}
        found: dict[str, float] = {
            "max_violation": sum(violations.values()) / len(violations),
            "worst_violation": max(violations.values()),
            "dead_experts": sum(dead.values()),
        }
        if self._detail != "summary":
            found |= {f"max_violation/{path}": value for path, value in violations.items()}
            found |= {f"dead_experts/{path}": value for path, value in dead.items()}
        if self._detail == "experts":
            for path, counts in loads.items():
                total = sum(counts) or 1.0
                found |= {f"load/{path}/{expert}": count / total for expert, count in enumerate(counts)}
        return {f"train/router/{name}": MetricValue.mean(value * seen, float(seen)) for name, value in found.items()}

    def _probe(self, router: Router, output: Any) -> None:
        try:
            router.read(output)
        except UnreadableRouter as error:
            self._error = self._error or error

    def _hook(self, place: int, router: Router) -> Callable[[nn.Module, Any, Any], Any]:
        @torch.compiler.disable
        def after_router(_module: nn.Module, _args: Any, output: Any) -> Any:
            if self._pass is None and not self._is_probing:
                return None
            if self._pass is None:
                self._probe(router, output)
                return None
            logits, experts = router.read(output)
            rows = self._pass.next_rows(place, len(logits))
            if self._pass.is_counting:
                self._pass.count(place, rows, logits.detach(), experts)
            if self._aux_loss_coef == 0 or not (torch.is_grad_enabled() and logits.requires_grad):
                return None
            at, carrier = router.carrier(output)
            return router.replace(output, at, _WithAuxLoss.apply(carrier, logits, self._pass, place, rows))

        return cast(Callable[[nn.Module, Any, Any], Any], after_router)


@dataclass(slots=True, kw_only=True)
class _Pass:
    """A micro-batch on its way through the model. A row is a sequence of the pack (or all of them, without the loss);
    the last row is for tokens that do not count."""

    rows: Tensor
    """[t] int64: the row of each token."""
    weights: Tensor
    """[S + 1]: weight of a sequence's E sum_i counts_i sum_t p_ti in the loss of the step."""
    num_rows: int
    gradient_factor: float
    """What the gradient of the auxiliary loss is multiplied by: its coefficient times the loss scale."""
    is_counting: bool = True
    """False from the end of the forward on: what is recomputed then was counted already."""
    counts: dict[int, Tensor] = field(default_factory=dict)
    """Router -> [rows, E] int64; after `sum_counts`, over all tokens of the sequences."""
    probabilities: dict[int, Tensor] = field(default_factory=dict)
    """Router -> [rows, E], summed over this rank's tokens."""
    _num_seen: dict[int, int] = field(default_factory=dict)

    def next_rows(self, place: int, num_tokens: int) -> Tensor:
        """Returns the rows of the tokens that a router is called with: all of them, or the next ones of a tiled MLP."""
        start = self._num_seen.get(place, 0)
        self._num_seen[place] = (start + num_tokens) % len(self.rows)
        return self.rows[start : start + num_tokens]

    def count(self, place: int, rows: Tensor, logits: Tensor, experts: Tensor) -> None:
        """Counts n of this rank's tokens: rows [n], logits [n, E], experts [n, k]."""
        num_experts = logits.shape[-1]
        if place not in self.counts:
            self.counts[place] = experts.new_zeros(self.num_rows, num_experts)
            self.probabilities[place] = logits.new_zeros(self.num_rows, num_experts, dtype=_dtype(logits))
        cells = (rows[:, None] * num_experts + experts).flatten()
        self.counts[place].view(-1).scatter_add_(0, cells, torch.ones_like(cells))
        if self.gradient_factor:
            self.probabilities[place].index_add_(0, rows, logits.softmax(-1, dtype=_dtype(logits)))

    def sum_counts(self, ulysses: Ulysses) -> None:
        """Sums the counts of all routers over the ranks that share the sequences, in one collective."""
        flat = torch.cat([counts.flatten() for counts in self.counts.values()])
        ulysses.sum_over_ranks(flat)
        parts = flat.split([counts.numel() for counts in self.counts.values()])
        self.counts = {
            place: part.view_as(counts) for (place, counts), part in zip(self.counts.items(), parts, strict=True)
        }

    def losses(self) -> Iterator[tuple[int, Tensor]]:
        """Yields (router, this rank's share of its loss [])."""
        for place, counts in self.counts.items():
            per_row = (counts * self.probabilities[place]).sum(-1) * counts.shape[-1]
            yield place, (per_row * self.weights).sum()

    def gradient(self, place: int, rows: Tensor, logits: Tensor) -> Tensor:
        """Returns the gradient [n, E] of the loss with respect to the logits of n tokens. f_i has none."""
        counts = self.counts[place]
        factors = self.weights * (self.gradient_factor * counts.shape[-1])
        probabilities = logits.softmax(-1, dtype=_dtype(logits))
        pull = (factors[:, None] * counts)[rows].to(probabilities.dtype)
        gradient = probabilities * (pull - (probabilities * pull).sum(-1, keepdim=True))
        return gradient.to(logits.dtype)


class _WithAuxLoss(torch.autograd.Function):
    """Passes on the tensor that the block continues with; its backward adds the gradient of the auxiliary loss to that
    of the logits.

    So the loss itself, which is known after the last layer and on several ranks, need not go through the model's
    outputs, and the gradient is there again when a layer is recomputed."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, logits: Tensor, of_pass: _Pass, place: int, rows: Tensor) -> Tensor:
        ctx.of_pass, ctx.place, ctx.rows = of_pass, place, rows
        ctx.save_for_backward(logits)
        return carrier.view_as(carrier)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        return grad, ctx.of_pass.gradient(ctx.place, ctx.rows, logits), None, None, None


def _rows(batch: TokenBatch, tokens: TokenSlice, *, by_sequence: bool) -> Tensor:
    """[t] int64: the row of each of this rank's tokens, as in `_Pass`."""
    ends = tokens.layout.cu_seqlens[1:]
    own = torch.arange(len(tokens.input_ids), device=ends.device) + tokens.first_token
    num_real = tokens.num_tokens if batch.sample_index else 0
    last = len(batch.cu_seqlens) - 1 if by_sequence else 1
    rows = torch.searchsorted(ends, own.to(ends.dtype), right=True) if by_sequence else torch.zeros_like(own)
    return torch.where(own < num_real, rows, last)


def _weights(batch: TokenBatch, tokens: TokenSlice) -> Tensor:
    """[S + 1] float64: 1 / T^2 of the sequences that are trained, 0 of the others."""
    trained = torch.cat([batch.loss_mask.new_zeros(1, dtype=torch.int64), batch.loss_mask.cumsum(0)])
    is_trained = trained[batch.cu_seqlens.long()].diff() > 0
    weights = is_trained / batch.cu_seqlens.diff().double().square()
    return to_device(torch.cat([weights, weights.new_zeros(1)]), tokens.input_ids.device)


def _dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _add(totals: dict[int, Tensor], place: int, value: Tensor) -> None:
    totals[place] = totals[place] + value if place in totals else value
