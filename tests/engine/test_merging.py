"""On whole tensors; over ranks, and against peft, in test_adapters and test_convert."""

import pytest
import torch
from tiny_models import tiny_folder

from shardwise.config import LoraConfig
from shardwise.engine.lora import inject_lora
from shardwise.engine.model import build_on_meta
from shardwise.engine.runtime_state import merged_state, runtime_state


@pytest.fixture
def adapted(tmp_path):
    model = build_on_meta(tiny_folder("llama", tmp_path))
    inject_lora(model, LoraConfig(rank=2, modules_to_save=["lm_head"]))
    return model


def test_a_merged_tensor_is_base_plus_scaled_product_and_a_saved_module_its_trained_copy(adapted):
    adapted = adapted.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.normal_()
    layer = adapted.model.layers[0].self_attn.q_proj
    base, a, b = layer.base_layer.weight, layer.lora_A.default.weight, layer.lora_B.default.weight
    merged = merged_state(adapted)
    torch.testing.assert_close(merged["model.layers.0.self_attn.q_proj.weight"], base + 32.0 / 2 * b @ a)
    head = adapted.lm_head
    assert torch.equal(merged["lm_head.weight"], head.modules_to_save.default.weight)
    assert torch.equal(runtime_state(adapted)["lm_head.weight"], head.original_module.weight)
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(merged[norm], runtime_state(adapted)[norm])


@torch.no_grad()
def test_a_transposed_weight_is_merged_with_the_transposed_product_and_each_column_has_its_magnitude(tmp_path):
    model = build_on_meta(tiny_folder("gpt2", tmp_path))
    inject_lora(model, LoraConfig(rank=2, alpha=6, use_dora=True))
    model = model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_()
    layer = model.transformer.h[1].mlp.c_fc
    base, a, b = layer.base_layer.weight, layer.lora_A.default.weight, layer.lora_B.default.weight
    merged = merged_state(model)["transformer.h.1.mlp.c_fc.weight"]
    assert merged.shape == (30, 50)
    for output, magnitude in enumerate(layer.lora_magnitude_vector.default.weight):
        column = base[:, output] + 6 / 2 * (b[output] @ a)
        torch.testing.assert_close(merged[:, output], magnitude * column / column.norm(), atol=1e-5, rtol=1e-5)
