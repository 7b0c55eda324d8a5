import math

import pytest
import torch
from transformers import CohereConfig, FalconH1Config, Gemma2Config, GraniteConfig, HyperCLOVAXConfig, LlamaConfig

from shardwise.ops import LogitTransform, project_float32, repeated_projection


@pytest.mark.parametrize(
    ("config", "expected", "keys"),
    [
        (LlamaConfig(), LogitTransform(), []),
        (Gemma2Config(final_logit_softcapping=30.0), LogitTransform(softcap=30.0), ["final_logit_softcapping"]),
        (Gemma2Config(final_logit_softcapping=1.0), LogitTransform(softcap=1.0), ["final_logit_softcapping"]),
        (Gemma2Config(final_logit_softcapping=None), LogitTransform(), []),
        (CohereConfig(logit_scale=0.0625), LogitTransform(scale=0.0625), ["logit_scale"]),
        (CohereConfig(logit_scale=1.0), LogitTransform(), []),
        (FalconH1Config(lm_head_multiplier=0.5), LogitTransform(scale=0.5), ["lm_head_multiplier"]),
        (GraniteConfig(logits_scaling=8.0), LogitTransform(scale=0.125), ["logits_scaling"]),
        (HyperCLOVAXConfig(logits_scaling=8.0), LogitTransform(scale=8.0), ["logits_scaling"]),
    ],
    ids=["llama", "gemma2", "gemma2-1", "gemma2-without", "cohere", "cohere-1", "falcon-h1", "granite", "hyperclovax"],
)
def test_transform_is_read_from_the_config_of_the_family(config, expected, keys):
    assert LogitTransform.from_config(config) == expected
    assert LogitTransform.keys_of(config) == keys


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_forward_and_backward_by_hand(scale, softcap):
    """f(x) = c tanh(s x / c), f'(x) = s (1 - tanh^2(s x / c)); without a cap f(x) = s x."""
    values = [-20.0, -1.5, 0.0, 0.25, 4.0]
    transform = LogitTransform(scale=scale, softcap=softcap)
    transformed = transform.forward_(torch.tensor(values))
    if softcap is None:
        expected, slopes = [scale * x for x in values], [scale] * len(values)
    else:
        expected = [softcap * math.tanh(scale * x / softcap) for x in values]
        slopes = [scale * (1 - math.tanh(scale * x / softcap) ** 2) for x in values]
    assert transformed.tolist() == pytest.approx(expected, abs=1e-6)
    gradient = transform.backward_(torch.full((5,), 2.0), transformed)
    assert gradient.tolist() == pytest.approx([2 * slope for slope in slopes], abs=1e-6)


def test_projection_of_bfloat16_is_not_rounded_to_bfloat16():
    """Products of bfloat16 numbers are exact in float32; only their sum rounds, at 1e-7 and not at 4e-3."""
    torch.manual_seed(0)
    states, weight = torch.randn(3, 64).bfloat16(), torch.randn(11, 64).bfloat16()
    logits = project_float32(states, weight)
    exact = states.double() @ weight.double().t()
    assert logits.dtype == torch.float32
    assert (logits.double() - exact).abs().max() < 1e-5
    assert ((states @ weight.t()).double() - exact).abs().max() > 1e-2, "what rounding would cost"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeated_projection_changes_no_bit(dtype):
    torch.manual_seed(0)
    states, weight = torch.randn(3, 64).to(dtype), torch.randn(11, 64).to(dtype)
    prepared = repeated_projection(weight)
    assert prepared.dtype == torch.float32
    assert torch.equal(project_float32(states, prepared), project_float32(states, weight))
