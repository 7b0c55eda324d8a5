"""Rounds float32 to bfloat16 without a bias, by random bits that depend on (key, element) and on no generator.

A bfloat16 weight has 8 bits of mantissa: rounded to nearest, an update below 2**-9 of the weight is lost. Rounded up
with the probability of its distance from below, it is kept on average (Gupta et al. 2015).
"""

import hashlib

import torch
from torch import Tensor

_LOW_BITS = (1 << 16) - 1
"""The bits of a float32 that bfloat16 does not have."""


def rounding_key(seed: int, update: int, name: str) -> int:
    """The key of one update of one parameter: a signed 32-bit integer."""
    digest = hashlib.blake2b(f"{seed}/{update}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_low_bits(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Returns [count] int32, uniform in [0, 2**16): a hash of key and the elements first, first + 1, ...

    The bits of an element do not depend on how a tensor is sharded, so neither does training. The mixer is lowbias32
    (Wellons 2018), in wrapping int32 arithmetic; `>>` keeps the sign, hence the masks.
    """
    first_wrapped = (first + 2**31) % 2**32 - 2**31
    bits = torch.arange(count, dtype=torch.int32, device=device).add_(first_wrapped).bitwise_xor_(key)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
    return bits.bitwise_and_(_LOW_BITS)


def round_stochastically(values: Tensor, low_bits: Tensor) -> Tensor:
    """Returns one of the two bfloat16 neighbors of each value, the nearer one with the higher probability.

    A float32 is sign, exponent and mantissa in this order, so adding to the bits that are cut off carries into the next
    bfloat16 away from zero, whatever the sign. Infinities and NaN stay what they are.

    Args:
        values: float32. low_bits: int32 in [0, 2**16), of the same shape.
    Returns:
        bfloat16, of the same shape.
    """
    carried = values.view(torch.int32).add(low_bits).bitwise_and_(~_LOW_BITS).view(torch.float32)
    return torch.where(values.isfinite(), carried, values).to(torch.bfloat16)
