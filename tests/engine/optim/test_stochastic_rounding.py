import math

import pytest
import torch

from shardwise.engine.optim.stochastic_rounding import random_low_bits, round_stochastically, rounding_key

CPU = torch.device("cpu")
NUM = 1 << 18


def test_random_bits_are_uniform_and_independent():
    """Chi-square of 2**16 cells over 2**20 draws is 65535 +- 362 (one sigma); correlations are 0 +- 2**-10."""
    bits = random_low_bits(rounding_key(1, 2, "a"), 0, 1 << 20, CPU)
    assert bits.dtype == torch.int32
    counts = torch.bincount(bits, minlength=1 << 16).double()
    assert len(counts) == 1 << 16
    assert (counts - 16).square().sum().item() / 16 == pytest.approx(65535, abs=4 * 362)
    others = [random_low_bits(rounding_key(*key), 0, 1 << 20, CPU) for key in [(1, 3, "a"), (1, 2, "b"), (2, 2, "a")]]
    shifted = [bits.roll(shift) for shift in (1, 2, 64, 1 << 10)]
    correlations = torch.corrcoef(torch.stack([bits, *others, *shifted]).double())[0, 1:]
    assert correlations.abs().max().item() < 5 * 2**-10


def test_bits_belong_to_the_element_and_not_to_the_shard():
    key = rounding_key(0, 7, "a")
    whole = random_low_bits(key, 0, 100, CPU)
    assert torch.equal(whole, torch.cat([random_low_bits(key, start, 20, CPU) for start in range(0, 100, 20)]))
    beyond = random_low_bits(key, 2**32 + 5, 3, CPU)
    assert torch.equal(beyond, whole[5:8])
    assert len(random_low_bits(key, 2**31 - 2, 4, CPU).unique()) == 4


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_mean_of_roundings_is_the_value(sign, share):
    """Between bfloat16 neighbours 1 and 1 + 2**-7; the mean of N draws errs by the gap * sqrt(p (1 - p) / N)."""
    gap = 2.0**-7
    value = torch.tensor(sign * (1 + share * gap)).expand(NUM).contiguous()
    rounded = round_stochastically(value, random_low_bits(rounding_key(0, 0, "a"), 0, NUM, CPU))
    assert rounded.dtype == torch.bfloat16
    assert set(rounded.double().unique().tolist()) == ({sign} if share == 0 else {sign, sign * (1 + gap)})
    sigma = gap * math.sqrt(share * (1 - share) / NUM)
    assert rounded.double().mean().item() == pytest.approx(value[0].item(), abs=4 * sigma)


def test_infinities_nan_and_zeros_stay_what_they_are():
    values = torch.tensor([math.inf, -math.inf, 0.0, -0.0, math.nan])
    rounded = round_stochastically(values, torch.full((5,), 0xFFFF, dtype=torch.int32))
    assert rounded[:4].tolist() == [math.inf, -math.inf, 0.0, 0.0]
    assert math.copysign(1.0, rounded[3].item()) == -1.0
    assert math.isnan(rounded[4].item())


def test_values_of_bfloat16_are_not_moved():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    bits = torch.full((1000,), 0xFFFF, dtype=torch.int32)
    assert torch.equal(round_stochastically(values.float(), bits), values)
