"""Ulysses sequence parallelism: P ranks share a packed batch, each computes T / P of its tokens everywhere but in
attention, where it computes H / P of the heads for all T tokens (Jacobs et al. 2023).

Shapes: P ranks, T tokens of the padded pack, t = T / P tokens of one rank, H heads, K key/value heads, d head dim.
"""

import math
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.config import ConfigError, ModelError
from shardwise.engine.exchange import send_rows
from shardwise.engine.mesh import any_of, divisors


class Ulysses:
    """The exchanges between the ranks that share a sequence. One all-to-all per tensor; nothing waits for the host."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def heads_of_all_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """query [H, t, d], key and value [K, t, d] -> this rank's heads of all tokens: [H/P, T, d], [K'/P, T, d].

        Where P does not divide K, key and value heads are repeated, as little as possible, so that each rank has those
        its queries need.

        Raises:
            ModelError: P does not divide H.
        """
        if query.shape[0] % self.size:
            raise ModelError(
                f"engine.ulysses_size={self.size} does not divide the {query.shape[0]} query heads of this model's "
                "attention"
            )
        num_copies = self.size // math.gcd(key.shape[0], self.size)
        if num_copies > 1:
            key, value = (x.repeat_interleave(num_copies, dim=0) for x in (key, value))
        return self._to_heads(query), self._to_heads(key), self._to_heads(value)

    def tokens_of_all_heads(self, output: Tensor) -> Tensor:
        """[H/P, T, d] -> this rank's tokens of all heads [H, t, d]."""
        by_rank = output.unflatten(1, (self.size, -1)).transpose(0, 1)
        exchanged: Tensor = _AllToAll.apply(by_rank.contiguous(), self._group)
        return exchanged.flatten(0, 1)

    def own_heads(self, per_head: Tensor) -> Tensor:
        """Returns the rows of this rank's heads, from a parameter with one row per head [H, ...]."""
        return per_head.chunk(self.size)[self.rank]

    def gather_tokens(self, values: Tensor) -> Tensor:
        """[t] -> [T], the same on every rank. Backward takes this rank's slice: every rank computes the whole loss."""
        gathered: Tensor = _GatherTokens.apply(values, self._group)
        return gathered

    def send_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Like `exchange.send_rows`, between the ranks that share a sequence."""
        return send_rows(rows, sent, received, self._group)

    def sum_over_ranks(self, counts: Tensor) -> None:
        """Sums in place, over the ranks that share a sequence, what each counted in its tokens."""
        dist.all_reduce(counts, group=self._group)

    def _to_heads(self, x: Tensor) -> Tensor:
        exchanged: Tensor = _AllToAll.apply(x.unflatten(0, (self.size, -1)).contiguous(), self._group)
        return exchanged.transpose(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """[P, ...]: slice p goes to rank p; slice p of the result came from rank p. The operation is its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad.contiguous(), ctx.group), None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.num_tokens = dist.get_rank(group), values.shape[0]
        gathered = values.new_empty(dist.get_world_size(group), ctx.num_tokens)
        dist.all_gather(list(gathered), values.contiguous(), group=group)
        return gathered.flatten()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(0, ctx.rank * ctx.num_tokens, ctx.num_tokens), None


def check_heads(num_heads: int, ulysses_size: int, num_ranks: int) -> None:
    """Raises ConfigError if the query heads cannot be split; lists the sizes that would do on the `num_ranks` ranks
    that share one copy of the model."""
    if num_heads % ulysses_size:
        raise ConfigError(
            f"engine.ulysses_size={ulysses_size} does not divide num_attention_heads={num_heads}; on "
            f"{num_ranks} ranks that share one copy of the model use {any_of(divisors(gcd(num_heads, num_ranks)))}"
        )
