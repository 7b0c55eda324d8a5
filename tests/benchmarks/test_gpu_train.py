"""The formulas that GPU measurements are compared with, and the benchmark's own path from end to end on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3ForCausalLM

from benchmarks.gpu_train import Cell, attempt, cells, default_options
from benchmarks.limits import QWEN3, ModelShape
from shardwise.config import EngineConfig
from shardwise.engine.activations import checkpoint_layers
from shardwise.engine.attention import PACKED_ATTENTION, AttentionBackend, PackedCall, register_packed_attention
from shardwise.ops import PackedLayout

ROOT = Path(__file__).parents[2]
SHAPE = ModelShape(hidden=24, layers=3, heads=4, kv_heads=2, head_dim=10, ffn=56, tied=False, vocab=96)


def eager_model(shape):
    config = shape.config()
    config._attn_implementation = "eager"
    return Qwen3ForCausalLM(config)


def test_flops_equal_those_counted_but_for_the_half_of_attention_that_a_causal_mask_spares():
    model, lengths = eager_model(SHAPE), [16, 5]
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            logits = model(input_ids=torch.randint(3, 96, (1, length)), use_cache=False).logits
            logits.sum().backward()
    # Eager attention computes all s x s scores: 4 q s^2 a layer instead of 2 q s (s + 1).
    spared = sum(SHAPE.layers * 2 * 40 * (2 * s * s - s * (s + 1)) for s in lengths)
    assert counter.get_total_flops() == SHAPE.train_flops(lengths, sum(lengths)) + 3 * spared


@pytest.mark.parametrize("shape", [SHAPE, *QWEN3.values()])
def test_number_of_parameters_is_that_of_the_model(shape):
    with torch.device("meta"):
        model = Qwen3ForCausalLM(shape.config())
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_untrained_tokens_cost_no_projection():
    projection = 2 * SHAPE.vocab * SHAPE.hidden
    assert SHAPE.train_flops([10, 10], 20) - SHAPE.train_flops([10, 10], 18) == 3 * 2 * projection


def bytes_left_by_forward(options):
    """Of a pack of two sequences, 21 tokens, its logits included."""
    register_packed_attention()
    config = SHAPE.config()
    config._attn_implementation = PACKED_ATTENTION
    model = Qwen3ForCausalLM(config).bfloat16()
    checkpoint_layers(model, [f"model.layers.{i}" for i in range(SHAPE.layers)], EngineConfig(**options))
    layout = PackedLayout.from_cu_seqlens(torch.tensor([0, 16, 21], dtype=torch.int32), device=torch.device("cpu"))
    inputs = {
        "input_ids": torch.full((1, 21), 3),
        "position_ids": torch.tensor([[*range(16), *range(5)]]),
        "packed": PackedCall(layout, AttentionBackend("loop", None)),
        "use_cache": False,
    }
    model(**inputs)  # whatever is allocated once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        logits = model(**inputs).logits
    assert logits.requires_grad
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages())


def test_what_selective_keeps_is_what_the_formula_says():
    selective, full = ({"activation_checkpointing": kind} for kind in ("selective", "full"))
    formula = SHAPE.kept_bytes(EngineConfig(**selective)) - SHAPE.kept_bytes(EngineConfig(**full))
    assert bytes_left_by_forward(selective) - bytes_left_by_forward(full) == SHAPE.layers * 21 * formula


def test_cells_cover_one_document_and_packed_ones():
    names = [cell.name for cell in cells(["0.6b", "8b"], [8192, 65536])]
    assert names == [
        "0.6b/8192/one",
        "0.6b/8192/one/compile_layers=true",
        "0.6b/8192/4096s",
        "0.6b/8192/4096s/compile_layers=true",
        "0.6b/65536/one",
        "0.6b/65536/4096s",
        "8b/8192/one",
        "8b/8192/4096s",
        "8b/65536/one",
        "8b/65536/4096s",
    ]
    assert Cell("tiny", 10, 4).lengths == [4, 4, 2]


def test_options_spend_time_on_memory_only_where_memory_is_short():
    """On 139 GiB: the smallest shape keeps its activations, the largest needs bfloat16 masters and checkpointing."""
    memory = 139 * 2**30
    small = default_options(QWEN3["0.6b"], 8192, memory)
    large = default_options(QWEN3["8b"], 65536, memory)
    assert small == ["param_dtype=bfloat16", "master_dtype=float32"]
    assert {"master_dtype=bfloat16", "activation_checkpointing=full", "apply_tiled_mlp=true"} <= set(large)


def test_a_cell_that_cannot_fit_is_not_built():
    """8B with AdamW's float32 states on 79 GiB."""
    figures = attempt(Cell("8b", 8192, 8192), [], torch.device("cpu"), rate=1e12, memory=79 * 2**30, max_steps=2)
    assert figures["out_of_memory"]
    assert figures["estimated_gib"] > 79


@pytest.mark.full
def test_tiny_runs_end_to_end(tmp_path):
    out = tmp_path / "figures.json"
    small = ["--device", "cpu", "--models", "tiny", "--tokens", "48", "--steps", "2", "--matmul-seconds", "0.1"]
    option = ["--option", "activation_checkpointing=full", "--option", "optimizer.optimizer=muon"]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_train", *small, *option, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    values = json.loads(out.read_text())["values"]
    figures = values["cells"]["tiny/48/one"]
    assert figures["options"][-2:] == ["activation_checkpointing=full", "optimizer.optimizer=muon"]
    assert figures["step_ms"] > 0
    flops = QWEN3["tiny"].train_flops([48], 47)
    expected = flops / (figures["step_ms"] / 1000) / (values["matmul_teraflops"] * 1e12)
    assert figures["mfu"] == pytest.approx(expected, rel=0.05, abs=1e-4)
    assert "aten::mm" in run.stdout, "the profile of one step"
