"""Sampling whose random draws belong to a sequence, not to a batch.

A global generator would tie the tokens of a request to whatever else is in its batch and to the number of ranks. Here
every draw is a function of (seed, uid, completion index, position) alone.

Shapes: B rows, V vocabulary.
"""

import hashlib

import torch
from torch import Tensor

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


def sample(logits: Tensor, temperatures: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a token for each row by inverting the cumulative distribution.

    Args:
        logits: [B, V] float32, after the family's own transform; overwritten.
        temperatures: [B] float32; 0 takes the likeliest token.
        draws: [B] float64 in [0, 1).
    Returns:
        tokens [B] int64 and their logprobs [B] float32 under the distribution they were drawn from (temperature
        applied; greedy rows: at temperature 1).
    """
    greedy = temperatures == 0
    logits.div_(torch.where(greedy, 1.0, temperatures)[:, None])
    logprobs = torch.log_softmax(logits, dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1)
    total = cumulative[:, -1]
    # Rounded to float32 the threshold can reach the total, beyond which only tokens of probability 0 are left.
    threshold = torch.minimum((draws * total).float(), total.nextafter(torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]
    tokens = torch.where(greedy, logprobs.argmax(dim=-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
