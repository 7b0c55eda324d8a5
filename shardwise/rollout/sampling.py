"""Sampling whose random draws belong to a sequence, not to a batch.

A global generator would tie the tokens of a request to whatever else is in its batch and to the number of ranks. Here
every draw is a function of (seed, uid, completion index, position) alone.

Shapes: B rows, V vocabulary.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.types import GenerateRequest

_MASK_34, _MASK_37, _MASK_33, _MASK_53 = ((1 << bits) - 1 for bits in (34, 37, 33, 53))


def stream_key(seed: int, uid: str, index: int) -> int:
    """Returns the key of one completion's random stream, as a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{seed}/{uid}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Draws one uniform number in [0, 1) for each row: SplitMix64 (Steele et al. 2014) of key + position.

    Args:
        keys, positions: [B] int64.
    Returns:
        [B] float64.
    """
    state = keys + (positions + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
    state = (state ^ ((state >> 30) & _MASK_34)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    state = (state ^ ((state >> 27) & _MASK_37)) * -7723592293110705685  # 0x94D049BB133111EB
    state = state ^ ((state >> 31) & _MASK_33)
    return ((state >> 11) & _MASK_53).double() * 2.0**-53


@dataclass(frozen=True, slots=True)
class Settings:
    """How each row is sampled. The two flags tell the host which settings no row uses, so that they cost nothing."""

    temperatures: Tensor
    """[B] float32; 0 takes the most likely token."""
    top_k: Tensor
    """[B] int64: only this many most likely tokens may be drawn; 0 sets no limit."""
    top_p: Tensor
    """[B] float32: only the most likely tokens that hold this share of the probability may be drawn, after top_k and
    min_p have been applied; 1 allows all."""
    min_p: Tensor
    """[B] float32: only tokens with at least this fraction of the most likely one's probability may be drawn; 0 allows
    all."""
    any_greedy: bool
    """Whether a temperature is 0, or was 0 in a row that has been removed."""
    any_restricted: bool
    """Whether a top_k, top_p or min_p excludes tokens, or did in a row that has been removed."""

    @classmethod
    def of(cls, requests: Sequence[GenerateRequest], device: torch.device) -> Self:
        """Builds the settings with one row for each request."""
        temperatures = torch.tensor([request.temperature for request in requests], dtype=torch.float32)
        return cls(
            temperatures.to(device),
            torch.tensor([request.top_k for request in requests], dtype=torch.int64, device=device),
            torch.tensor([request.top_p for request in requests], dtype=torch.float32, device=device),
            torch.tensor([request.min_p for request in requests], dtype=torch.float32, device=device),
            any_greedy=bool((temperatures == 0).any()),
            any_restricted=any(request.restricts for request in requests),
        )

    def __getitem__(self, rows: Any) -> Self:
        """Selects rows, by anything that can index a tensor."""
        return self._with_rows(lambda values: values[rows])

    def moved(self, source: Tensor, target: Tensor) -> Self:
        """Returns a copy in which the rows at `source` have replaced those at `target`."""
        return self._with_rows(lambda values: values.index_copy(0, target, values[source]))

    def then(self, others: Self) -> Self:
        """Returns these rows followed by the others."""
        return type(self)(
            torch.cat([self.temperatures, others.temperatures]),
            torch.cat([self.top_k, others.top_k]),
            torch.cat([self.top_p, others.top_p]),
            torch.cat([self.min_p, others.min_p]),
            any_greedy=self.any_greedy or others.any_greedy,
            any_restricted=self.any_restricted or others.any_restricted,
        )

    def _with_rows(self, rows_of: Callable[[Tensor], Tensor]) -> Self:
        return replace(
            self,
            temperatures=rows_of(self.temperatures),
            top_k=rows_of(self.top_k),
            top_p=rows_of(self.top_p),
            min_p=rows_of(self.min_p),
        )


def sample(logits: Tensor, settings: Settings, draws: Tensor, *, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draws a token for each row by inverting the cumulative distribution.

    top_k, top_p, min_p and banned tokens restrict what is drawn but change no logprob: everywhere a logprob is that of
    the policy at this temperature, which is what training computes.

    Args:
        logits: [B, V] float32, after the family's own transform; overwritten.
        draws: [B] float64 in [0, 1).
        banned: int64, tokens that are never drawn, not even at temperature 0.
    Returns:
        tokens [B] int64 and their logprobs [B] float32 (greedy rows: at temperature 1).
    """
    greedy = settings.temperatures == 0
    logits.div_(torch.where(greedy, 1.0, settings.temperatures)[:, None])
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    allowed, weights = logits, logits.exp()
    log_total = weights.sum(dim=-1).log()
    if banned is not None:
        allowed = logits.index_fill(1, banned, -torch.inf)
        weights = allowed.softmax(dim=-1)
    if settings.any_restricted:
        weights.masked_fill_(allowed < _least_logit(allowed, settings)[:, None], 0.0)
    tokens = _invert(weights, draws)
    if settings.any_greedy:
        tokens = torch.where(greedy, _likeliest(allowed), tokens)
    return tokens, logits.gather(1, tokens[:, None])[:, 0] - log_total


_BLOCK_TOKENS = 128
"""Size of the blocks of the vocabulary. It is read once; then one number per block is searched, and one block."""


def _blocks(values: Tensor, fill: float) -> Tensor:
    """Splits [B, V] -> [B, blocks, _BLOCK_TOKENS], the last block padded with `fill`."""
    if missing := -values.shape[1] % _BLOCK_TOKENS:
        values = F.pad(values, (0, missing), value=fill)
    return values.unflatten(1, (-1, _BLOCK_TOKENS))


def _likeliest(logits: Tensor) -> Tensor:
    """Argmax, [B, V] -> [B], the first of equals; argmax over whole rows is not vectorized on a CPU."""
    blocks = _blocks(logits, -torch.inf)
    block = blocks.amax(dim=-1).argmax(dim=-1)
    return block * _BLOCK_TOKENS + _chosen(blocks, block).argmax(dim=-1)


def _invert(weights: Tensor, draws: Tensor) -> Tensor:
    """weights [B, V] >= 0, draws [B] in [0, 1) -> [B]: where the cumulative weight passes that share of the total."""
    blocks = _blocks(weights, 0.0)
    sums = blocks.sum(dim=-1).double()
    block, height = _pass(sums, draws * sums.sum(dim=-1))
    place, _ = _pass(_chosen(blocks, block).double(), height)
    return (block * _BLOCK_TOKENS + place).clamp(max=weights.shape[1] - 1)


def _chosen(blocks: Tensor, block: Tensor) -> Tensor:
    """Picks one block of each row: blocks [B, N, L], block [B] -> [B, L]."""
    return blocks[torch.arange(len(block), device=block.device), block]


def _pass(weights: Tensor, height: Tensor) -> tuple[Tensor, Tensor]:
    """weights [B, N], height [B] -> the first place whose cumulative weight exceeds `height`, and how far into that
    place's weight `height` lies. The place always has a weight > 0: a `height` that rounding has brought to the total
    is lowered."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    height = torch.minimum(height, total.nextafter(torch.zeros_like(total)))[:, None]
    place = torch.searchsorted(cumulative, height, right=True)
    place = place.clamp(max=weights.shape[1] - 1)  # none is found if weights are NaN
    below = cumulative.gather(1, place) - weights.gather(1, place)
    return place[:, 0], (height - below).clamp(min=0)[:, 0]


def _least_logit(logits: Tensor, settings: Settings) -> Tensor:
    """logits [B, V] -> [B], the logit of the least likely token that may be drawn; others with the same logit may be
    drawn too."""
    num_words = logits.shape[1]
    limits = torch.where(settings.top_k == 0, num_words, settings.top_k)
    ordered = logits.topk(min(int(limits.max()), num_words), dim=-1).values
    kept = torch.arange(ordered.shape[1], device=ordered.device) < limits[:, None]
    kept &= ordered >= ordered[:, :1] + settings.min_p.log()[:, None]
    probabilities = torch.where(kept, (ordered - ordered[:, :1]).exp(), 0.0)
    likelier = probabilities.cumsum(-1) - probabilities
    nucleus = likelier < (settings.top_p * probabilities.sum(-1))[:, None]
    kept &= nucleus | (settings.top_p >= 1)[:, None]  # the sum of a large vocabulary is rounded
    last = kept.sum(-1, keepdim=True).clamp(min=1) - 1
    return ordered.gather(1, last)[:, 0]
