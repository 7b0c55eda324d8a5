"""Packed rows against bitsandbytes' own whole matrices, and a training step against peft on its own layers. Over
layouts and memory options: test_layout_invariance."""

import sys
from pathlib import Path

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from family_table import FAMILIES, save_model
from safetensors.torch import load_file
from sharded_lora import needs_integer_shards, peft_model, random_adapter, samples
from tiny_models import reference_logprobs, tiny_folder
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.config import ConfigError, EngineConfig, LoraConfig, OptimizerConfig
from shardwise.data.packing import pack, unpack
from shardwise.data.synthetic import train_tokenizer
from shardwise.engine import TrainEngine
from shardwise.engine.lora import inject_lora
from shardwise.engine.model import build_on_meta
from shardwise.engine.quantized import QuantizedLinear, pack_rows, packed_bytes, unpack_rows
from shardwise.recipes.losses import sft_loss

LORA = LoraConfig(rank=3, alpha=12, target_modules=["q_proj", "v_proj", "down_proj"], quantize_base="nf4")
LORA_ON_EXPERTS = LoraConfig(
    rank=3,
    alpha=12,
    target_modules=["q_proj", "v_proj"],
    target_parameters=["gate_up_proj", "down_proj"],
    quantize_base="nf4",
)
"""Of which the experts themselves are no linear layers, and stay as they are."""
LORA_ON_CONV1D = LoraConfig(rank=3, alpha=12, target_modules=["c_attn", "mlp.c_proj"], quantize_base="nf4")
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
"""Rows of whole blocks: what bitsandbytes makes of a whole matrix is then what it makes of rows."""
WIDE_GPT2 = {"hidden_size": 64, "n_inner": 128, "num_attention_heads": 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_whole_blocks_are_what_bitsandbytes_makes_of_the_matrix(dtype):
    torch.manual_seed(0)
    matrix = torch.randn(6, 192)
    matrix[2] = 0.0
    codes, state = quantize_4bit(matrix, blocksize=64, quant_type="nf4")
    state.dtype = dtype
    packed = pack_rows(matrix)
    assert packed.shape == (6, packed_bytes(192)) == (6, 3 * 36)
    assert torch.equal(packed[:, :96], codes.view(6, 96))
    assert torch.equal(unpack_rows(packed, 192, dtype), dequantize_4bit(codes, state))


def test_any_row_length_and_any_share_of_the_rows_give_the_same_bits():
    torch.manual_seed(0)
    matrix = torch.randn(5, 83)
    whole = unpack_rows(pack_rows(matrix), 83, torch.float32)
    assert (whole - matrix).abs().max() < 0.16 * matrix.abs().max()  # half the widest step of nf4's levels
    for first, last in ((0, 2), (2, 5), (3, 3)):
        part = unpack_rows(pack_rows(matrix[first:last]), 83, torch.float32)
        assert torch.equal(part, whole[first:last])


@needs_integer_shards
def test_all_layers_of_gpt2_are_quantised_with_rows_as_they_are_stored(tmp_path):
    model = build_on_meta(tiny_folder("gpt2", tmp_path))
    stored = {name: part.weight.shape for name, part in model.named_modules() if isinstance(part, Conv1D)}
    inject_lora(model, LORA_ON_CONV1D)
    layers = {
        name.removesuffix(".base_layer"): part
        for name, part in model.named_modules()
        if isinstance(part, QuantizedLinear)
    }
    assert layers.keys() == stored.keys()
    for name, (num_inputs, num_outputs) in stored.items():
        assert (layers[name].in_features, layers[name].out_features) == (num_inputs, num_outputs)
        assert layers[name].weight.shape == (num_inputs, packed_bytes(num_outputs))
        assert layers[name].outline().shape == (num_inputs, num_outputs)


@needs_integer_shards
def test_only_called_linear_layers_are_quantised(tmp_path):
    model = build_on_meta(tiny_folder("llama", tmp_path))
    linear = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    inject_lora(model, LORA.model_copy(update={"modules_to_save": ["model.layers.1.mlp.up_proj"]}))
    quantized = {name for name, part in model.named_modules() if isinstance(part, QuantizedLinear)}
    assert {name.removesuffix(".base_layer") for name in quantized} == linear - {
        "lm_head",
        "model.layers.1.mlp.up_proj",
    }
    assert "model.layers.0.self_attn.q_proj.base_layer" in quantized
    assert "model.layers.0.self_attn.k_proj" in quantized  # without an adapter


@needs_integer_shards
def test_weights_that_torchs_own_attention_reads_are_not_quantised(tmp_path):
    """That of the head of SigLIP."""
    save_model("llava_onevision", FAMILIES["llava_onevision"], tmp_path)
    model = build_on_meta(tmp_path)
    linear = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    inject_lora(model, LORA)
    quantized = {name for name, part in model.named_modules() if isinstance(part, QuantizedLinear)}
    left = linear - {name.removesuffix(".base_layer") for name in quantized}
    assert left == {"lm_head", "model.vision_tower.head.attention.out_proj"}


@needs_integer_shards
def test_what_inputs_are_cast_to_is_not_quantised(tmp_path):
    """LFM2-VL's embedding of patches."""
    save_model("lfm2_vl", FAMILIES["lfm2_vl"], tmp_path)
    model = build_on_meta(tmp_path)
    inject_lora(model, LoraConfig(rank=3, quantize_base="nf4"))
    embedding = model.model.vision_tower.embeddings.patch_embedding
    assert not any(isinstance(part, QuantizedLinear) for part in embedding.modules())


def trained(folder, lora, adapter, out, world):
    """Loss, gradients, logprobs, and the number of bytes that the linear layers' weights have on this rank; writes the
    merged model and the adapter."""
    lora = lora.model_copy(update={"adapter_path": str(adapter)})
    engine = TrainEngine.build(
        Path(folder), EngineConfig(lora=lora), device=torch.device("cpu"), optimizer=OptimizerConfig(learning_rate=1e-2)
    )
    step = pack(samples(), num_shards=world, max_tokens=64)
    mine = step.shards[dist.get_rank()]
    metrics = engine.forward_backward(mine, sft_loss, step.denominators)
    gradients = {
        name.replace(".default.", "."): p.grad.full_tensor().clone()
        for name, p in engine._model.hf_model.named_parameters()
        if p.grad is not None
    }
    packed = sum(part.weight.to_local().nbytes for part in engine._model.modules() if isinstance(part, QuantizedLinear))
    engine.optim_step()
    engine.export_adapter(Path(out) / "adapter", str(folder))
    engine.export_hf(Path(out) / "hf", train_tokenizer(["2+3=5"], vocab_size=261))
    outputs = [[found.logprobs for found in engine.forward(mine)]]
    shards = [None] * world
    dist.all_gather_object(shards, outputs[0])
    return metrics["train/loss"].result(), gradients, unpack(step, shards), packed, engine.num_parameters


@pytest.fixture(
    scope="module",
    params=[("llama", LORA, WIDE), ("qwen3_moe", LORA_ON_EXPERTS, WIDE), ("gpt2", LORA_ON_CONV1D, WIDE_GPT2)],
    ids=["layers", "experts", "conv1d"],
)
def wide(request, tmp_path_factory):
    family, lora, sizes = request.param
    folder = tiny_folder(family, tmp_path_factory.mktemp("wide"), **sizes)
    adapter = tmp_path_factory.mktemp("adapter") / "start"
    random_adapter(folder, lora, adapter)
    return folder, lora, adapter


@torch.no_grad()
def with_bitsandbytes_layers(model):
    """A peft model whose base computes with bitsandbytes' own Linear4bit. For a Conv1D transformers makes that of the
    transposed weight, with other blocks; here it stays, with what bitsandbytes gives back of the weight as stored."""
    for layer in model.modules():
        if isinstance(layer, Conv1D):
            layer.weight.copy_(dequantize_4bit(*quantize_4bit(layer.weight, blocksize=64, quant_type="nf4")))
    paths = [name for name, part in model.named_modules() if type(part) is nn.Linear and "lora_" not in name]
    for path in paths:
        if path.endswith("lm_head"):
            continue
        linear = model.get_submodule(path)
        layer = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4",
            compress_statistics=False,
        )  # fmt: skip
        layer.weight = bitsandbytes.nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False
        )
        model.set_submodule(path, layer.to("cpu"))
    return model


@needs_integer_shards
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_step_equals_that_of_peft_on_bitsandbytes_layers(run_ranks, wide, tmp_path, world):
    folder, lora, adapter = wide
    runs = run_ranks(trained, world, folder, lora, adapter, tmp_path, world)
    plain = with_bitsandbytes_layers(peft_model(folder, adapter))
    num_tokens = sum(int(sample.loss_mask.sum()) for sample in samples())
    loss = sum(-reference_logprobs(plain, s.token_ids)[s.loss_mask].sum() for s in samples()) / num_tokens
    loss.backward()
    assert sum(run[0] for run in runs) == pytest.approx(loss.item(), rel=2e-6)
    expected = {
        name.removeprefix("base_model.model.").replace(".default.", "."): p.grad
        for name, p in plain.named_parameters()
        if p.grad is not None
    }
    for run in runs:
        assert run[1].keys() == expected.keys()
        for name, gradient in expected.items():
            error = (run[1][name] - gradient).abs().max() / gradient.abs().max()
            assert error < 1e-5, (name, error)


@needs_integer_shards
def test_what_is_written_after_a_step_gives_the_engines_logprobs(run_ranks, wide, tmp_path):
    """The merged model as it is, and the adapter on bitsandbytes' own layers."""
    from transformers import AutoModelForCausalLM

    folder, lora, adapter = wide
    (*_, logprobs, packed, num_parameters), other = run_ranks(trained, 2, folder, lora, adapter, tmp_path, 2)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    adapted = with_bitsandbytes_layers(peft_model(folder, tmp_path / "adapter"))
    with torch.no_grad():
        for sample, found in zip(samples(), logprobs, strict=True):
            for model in (merged, adapted):
                expected = reference_logprobs(model, sample.token_ids)
                torch.testing.assert_close(found[sample.loss_mask], expected[sample.loss_mask], rtol=0, atol=1e-5)
    stored = load_file(Path(folder) / "model.safetensors")
    layers = ("proj.weight", "c_attn.weight", "c_fc.weight")
    numbers = sum(t.numel() for name, t in stored.items() if name.endswith(layers) and ".experts." not in name)
    assert packed + other[3] == numbers * 4.5 / 8
    rank = sum(t.numel() for t in load_file(tmp_path / "adapter" / "adapter_model.safetensors").values())
    assert num_parameters == sum(p.numel() for p in merged.parameters()) + rank


def test_a_torch_whose_fsdp_shards_no_integers_is_named(monkeypatch, tmp_path):
    from shardwise.engine import quantized

    model = build_on_meta(tiny_folder("llama", tmp_path))
    monkeypatch.setattr(quantized, "SHARDS_INTEGERS", False)
    with pytest.raises(
        ConfigError, match=r"quantize_base needs torch 2\.12 or newer, and this is \d.*leave the key out"
    ):
        inject_lora(model, LORA)


def test_without_bitsandbytes_the_error_says_what_to_install(monkeypatch, tmp_path):
    from shardwise.engine import quantized

    model = build_on_meta(tiny_folder("llama", tmp_path))
    monkeypatch.setattr(quantized, "SHARDS_INTEGERS", True)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    quantized._kernels.cache_clear()
    with pytest.raises(ConfigError, match=r"quantize_base needs bitsandbytes.*pip install bitsandbytes"):
        inject_lora(model, LORA)
