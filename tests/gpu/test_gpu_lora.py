"""Adapters on the GPU against peft's own model on the same device and in the same dtype, one sequence at a time."""

import json

import pytest
import torch
from small_gpu_model import LENGTHS, build, flat, gradients_of, loss_of, packed, relative_error, save_model
from tiny_models import random_samples, reference_logprobs, tiny_folder

from shardwise.config import LoraConfig

pytest.importorskip("peft", minversion="0.21")
from sharded_lora import needs_integer_shards, peft_model, random_adapter

LORAS = {
    "lora": LoraConfig(rank=8, alpha=16),
    "dora": LoraConfig(rank=8, alpha=16, use_dora=True),
    "experts": LoraConfig(rank=8, alpha=16, target_modules=["q_proj"], target_parameters=["gate_up_proj", "down_proj"]),
}
EXPERTS = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "max_position_embeddings": 512}
"""Rows that the kernel of grouped products can read: multiples of 16 bytes, in bfloat16 too."""


def adapted(tmp_path, variant, **overrides):
    """A model's folder, that of a random adapter for it, and the adapter as options of an engine."""
    if variant == "experts":
        folder = tiny_folder("qwen3_moe", tmp_path / "model", **EXPERTS | overrides)
    else:
        folder = save_model(tmp_path / "model")
    adapter = random_adapter(folder, LORAS[variant], tmp_path / "adapter")
    keys = LORAS[variant].model_dump(exclude_defaults=True) | {"adapter_path": str(adapter)}
    return folder, adapter, [f"lora.{key}={json.dumps(value)}" for key, value in keys.items()]


def samples():
    return random_samples(LENGTHS)


def of_peft(folder, adapter, device, dtype):
    """The mean loss of all trained tokens, and the gradients by name."""
    model = peft_model(folder, adapter).to(device).eval()
    for parameter in model.parameters():  # and no buffer: rotary frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    num_tokens, total = sum(int(sample.loss_mask.sum()) for sample in samples()), 0.0
    for sample in samples():
        scores = reference_logprobs(model, sample.token_ids.to(device))
        loss = -scores[sample.loss_mask.to(device)].sum() / num_tokens
        loss.backward()
        total += loss.item()
    named = {name.removeprefix("base_model.model."): p.grad for name, p in model.named_parameters()}
    return total, {name: gradient.float().cpu() for name, gradient in named.items() if gradient is not None}


def of_engine(folder, device, *options):
    engine = build(folder, device, *options)
    return loss_of(engine, packed(samples())), gradients_of(engine)


@pytest.mark.parametrize("variant", LORAS)
def test_float32_gradients_of_every_adapter_equal_those_of_peft(tmp_path, device, variant):
    """Of experts too, two of eight for each token."""
    folder, adapter, options = adapted(tmp_path, variant)
    expected_loss, expected = of_peft(folder, adapter, device, torch.float32)
    loss, gradients = of_engine(folder, device, *options)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative_error(gradients[name], gradient) < 1e-4, name


@pytest.mark.parametrize("variant", LORAS)
def test_bfloat16_gradients_are_as_close_to_float32_as_those_of_peft_are(tmp_path, device, variant):
    """Every token goes to all experts: among a few of them roundings would choose."""
    folder, adapter, options = adapted(tmp_path, variant, num_experts_per_tok=EXPERTS["num_experts"])
    exact_loss, exact = of_peft(folder, adapter, device, torch.float32)
    peft_loss, of_bfloat16_peft = of_peft(folder, adapter, device, torch.bfloat16)
    loss, gradients = of_engine(folder, device, "param_dtype=bfloat16", *options)
    assert loss == pytest.approx(exact_loss, rel=2e-3)
    assert peft_loss == pytest.approx(exact_loss, rel=2e-3)
    assert gradients.keys() == exact.keys()
    error, error_of_peft = (relative_error(flat(found), flat(exact)) for found in (gradients, of_bfloat16_peft))
    print(f"ours {error:.4f}, peft's {error_of_peft:.4f}")
    assert error < max(1.5 * error_of_peft, 0.01) < 0.1


@needs_integer_shards
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_base_in_4_bits_computes_as_the_weights_that_it_stands_for(tmp_path, device, dtype):
    """Those that the CPU makes of the codes, in a folder of their own."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    from shardwise.engine.quantized import pack_rows, unpack_rows

    folder, _, options = adapted(tmp_path, "lora")
    options.append(f"param_dtype={dtype}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = unpack_rows(pack_rows(layer.weight.data), layer.in_features, torch.float32)
    model.save_pretrained(tmp_path / "rounded")
    expected_loss, expected = of_engine(tmp_path / "rounded", device, *options)
    loss, gradients = of_engine(folder, device, *options, "lora.quantize_base=nf4")
    assert loss == pytest.approx(expected_loss, rel=1e-5 if dtype == "float32" else 1e-3)
    for name, gradient in expected.items():
        assert relative_error(gradients[name], gradient) < (1e-4 if dtype == "float32" else 2e-2), name
