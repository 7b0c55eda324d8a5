"""Sampling whose random draws belong to a sequence, not to a batch.

A global generator would tie the tokens of a request to whatever else is in its batch and to the number of ranks. Here
every draw is a function of (seed, uid, completion index, position) alone.

Shapes: B rows, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from shardwise.types import GenerateRequest

_MASK_34, _MASK_37, _MASK_33, _MASK_53 = ((1 << bits) - 1 for bits in (34, 37, 33, 53))


def stream_key(seed: int, uid: str, index: int) -> int:
    """The key of one completion's random stream, as a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{seed}/{uid}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """One uniform number in [0, 1) for each row: SplitMix64 (Steele et al. 2014) of key + position.

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
    """How each row is sampled."""

    temperatures: Tensor
    """[B] float32; 0 takes the likeliest token."""
    top_k: Tensor
    """[B] int64, so many likeliest tokens may be drawn; 0 sets no limit."""
    top_p: Tensor
    """[B] float32, the likeliest tokens that hold this share of the probability, after the other two; 1 is all."""
    min_p: Tensor
    """[B] float32, tokens with at least this share of the likeliest one's probability; 0 is all."""

    @classmethod
    def of(cls, requests: Sequence[GenerateRequest], device: torch.device) -> Self:
        """One row for each request."""
        return cls(
            torch.tensor([request.temperature for request in requests], dtype=torch.float32, device=device),
            torch.tensor([request.top_k for request in requests], dtype=torch.int64, device=device),
            torch.tensor([request.top_p for request in requests], dtype=torch.float32, device=device),
            torch.tensor([request.min_p for request in requests], dtype=torch.float32, device=device),
        )

    def __getitem__(self, rows: Any) -> Self:
        """Some of the rows, by whatever indexes a tensor."""
        return type(self)(*(getattr(self, field.name)[rows] for field in fields(self)))

    def moved(self, source: Tensor, target: Tensor) -> Self:
        """The rows at `source` copied over those at `target`."""
        own = (getattr(self, field.name) for field in fields(self))
        return type(self)(*(values.index_copy(0, target, values[source]) for values in own))

    def then(self, others: Self) -> Self:
        """These rows, and others behind them."""
        pairs = ((getattr(self, field.name), getattr(others, field.name)) for field in fields(self))
        return type(self)(*(torch.cat(pair) for pair in pairs))


def sample(
    logits: Tensor, settings: Settings, draws: Tensor, *, restricts: bool = False, banned: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draws a token for each row by inverting the cumulative distribution.

    top_k, top_p, min_p and banned tokens bound what is drawn and change no logprob: logprobs mean one thing everywhere,
    that of the policy at this temperature, which is what training computes.

    Args:
        logits: [B, V] float32, after the family's own transform; overwritten.
        draws: [B] float64 in [0, 1).
        restricts: whether any row has a top_k, top_p or min_p that leaves something out.
        banned: int64, tokens that are never drawn, also where temperature is 0.
    Returns:
        tokens [B] int64 and their logprobs [B] float32 (greedy rows: at temperature 1).
    """
    greedy = settings.temperatures == 0
    logits.div_(torch.where(greedy, 1.0, settings.temperatures)[:, None])
    logprobs = torch.log_softmax(logits, dim=-1)
    allowed = logprobs if banned is None else logprobs.index_fill(1, banned, -torch.inf)
    weights = allowed.exp()
    if restricts:
        weights.masked_fill_(allowed < _least_logprob(allowed, settings)[:, None], 0.0)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    # Rounded to float32 the threshold can reach the total, beyond which only tokens of probability 0 are left.
    threshold = torch.minimum((draws * total).float(), total.nextafter(torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]
    tokens = torch.where(greedy, allowed.argmax(dim=-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _least_logprob(logprobs: Tensor, settings: Settings) -> Tensor:
    """[B]: of the least likely token that may be drawn; others as likely as it may be drawn too."""
    num_words = logprobs.shape[1]
    limits = torch.where(settings.top_k == 0, num_words, settings.top_k)
    ordered = logprobs.topk(min(int(limits.max()), num_words), dim=-1).values
    kept = torch.arange(ordered.shape[1], device=ordered.device) < limits[:, None]
    kept &= ordered >= ordered[:, :1] + settings.min_p.log()[:, None]
    probabilities = torch.where(kept, ordered.exp(), 0.0)
    likelier = probabilities.cumsum(-1) - probabilities
    kept &= likelier < (settings.top_p * probabilities.sum(-1))[:, None]
    last = kept.sum(-1, keepdim=True).clamp(min=1) - 1
    return ordered.gather(1, last)[:, 0]
