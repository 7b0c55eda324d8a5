"""The bound that a decode step is compared with, and the benchmark's own path from end to end on the CPU."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, Qwen3ForCausalLM

from benchmarks import gpu_rollout
from benchmarks.gpu_rollout import Cell, build_engine, build_model, check_equal, measure, memory_rate
from benchmarks.limits import QWEN3, ModelShape

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SHAPE = ModelShape(hidden=24, layers=3, heads=4, kv_heads=2, head_dim=10, ffn=56, tied=False, vocab=96)


@pytest.mark.parametrize("shape", [SHAPE, QWEN3["tiny"]], ids=["untied", "tied"])
def test_a_decode_step_reads_its_matrices_once_and_the_cache_of_every_row(shape):
    model = Qwen3ForCausalLM(shape.config()).bfloat16()
    matrices = sum(m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Linear))
    cache = DynamicCache(config=model.config)
    model(torch.randint(3, shape.vocab, (5, 7)), past_key_values=cache)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert shape.decode_bytes(5, 7) == matrices + kept


def test_flops_of_a_decode_step_equal_those_counted():
    config = SHAPE.config()
    config._attn_implementation = "eager"
    model, cache = Qwen3ForCausalLM(config), DynamicCache(config=config)
    model(torch.randint(3, 96, (5, 6)), past_key_values=cache)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(3, 96, (5, 1)), past_key_values=cache)
    assert counter.get_total_flops() == SHAPE.decode_flops(5, 7)


def test_the_bound_is_memory_with_few_rows_and_arithmetic_with_many():
    shape, rates = QWEN3["0.6b"], {"bytes_per_second": 4e12, "flops_per_second": 8e14}
    contexts = [100, 101]
    few = sum(shape.decode_bytes(8, context) for context in contexts) / 4e12
    many = sum(shape.decode_flops(4096, context) for context in [1, 2]) / 8e14
    assert shape.decode_seconds(8, contexts, **rates) == pytest.approx(few)
    assert shape.decode_seconds(4096, [1, 2], **rates) == pytest.approx(many)


def test_a_cell_counts_the_steps_after_the_first_token():
    cell = Cell("tiny", rows=6, group_size=2, prompt_tokens=4, new_tokens=3)
    assert list(cell.contexts) == [5, 6]
    assert [len(prompt) for prompt in cell.prompts(0)] == [4, 4, 4]
    assert cell.prompts(0) != cell.prompts(1)


def test_both_sides_have_the_same_weights_in_memory_once():
    model = build_model(QWEN3["tiny"], CPU, torch.bfloat16)
    served = dict(build_engine(model, rows=2).served_weights())
    theirs = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert {name: tensor.data_ptr() for name, tensor in served.items()} == {
        name: tensor.data_ptr() for name, tensor in theirs.items()
    }
    assert {tensor.dtype for tensor in served.values()} == {torch.bfloat16}


def test_an_engine_that_computes_something_else_is_not_measured(monkeypatch):
    def build_other(model, *, rows):
        other = copy.deepcopy(model)  # else both sides would have the other weights
        other.get_parameter("model.norm.weight").data.mul_(torch.linspace(0.5, 2, QWEN3["tiny"].hidden))
        return build_engine(other, rows=rows)

    monkeypatch.setattr(gpu_rollout, "build_engine", build_other)
    with pytest.raises(RuntimeError, match=r"does not compute what the model does, in torch\.float32"):
        check_equal(QWEN3["tiny"], CPU, torch.float32, num_tokens=4)


def test_memory_is_read_at_a_rate_between_a_disk_and_a_cache():
    assert 1e8 < memory_rate(CPU, seconds=0.1) < 1e13


def test_a_turn_that_was_disturbed_is_measured_again(monkeypatch):
    seconds = iter([0.5, 0.3, 0.2, 0.6])  # first token, all tokens; something else ran beside the first pair
    monkeypatch.setattr(gpu_rollout, "timed", lambda *_: next(seconds))
    assert measure(CPU, lambda prompts, max_tokens: None, [], 8).decoding == pytest.approx(0.4)


def test_turns_that_are_always_disturbed_give_no_figure(monkeypatch):
    monkeypatch.setattr(gpu_rollout, "timed", lambda *_: 0.5)
    with pytest.raises(RuntimeError, match=r"5 times in a row 8 tokens took no longer than the first"):
        measure(CPU, lambda prompts, max_tokens: None, [], 8)


@pytest.mark.full
def test_tiny_runs_end_to_end(tmp_path):
    out = tmp_path / "figures.json"
    small = ["--rows", "4", "--group-size", "2", "--prompt-tokens", "6", "--new-tokens", "17", "--check-tokens", "4"]
    quick = ["--device", "cpu", "--models", "tiny", "--rounds", "2", "--sweep-seconds", "0.1"]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_rollout", *small, *quick, "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(out.read_text())
    values, figures = result["values"], result["values"]["cells"]["tiny/4"]
    least = QWEN3["tiny"].decode_seconds(
        4,
        range(7, 23),
        bytes_per_second=1e9 * values["memory_gigabytes_per_second"],
        flops_per_second=1e12 * values["matmul_teraflops"],
    )
    assert figures["bound_step_ms"] == pytest.approx(1000 * least / 16, rel=0.05, abs=1e-4)
    assert figures["bound"] == pytest.approx(figures["bound_step_ms"] / figures["ours_step_ms"], rel=0.05, abs=1e-4)
    assert figures["ours_tokens_per_second"] > 0
    assert result["ratios"].keys() == {"bound/tiny/4", "generate/tiny/4"}
    agreement = values["agreement"]["tiny"]
    assert agreement["torch.float32"]["greedy_equal_share"] == 1
    assert agreement["torch.float32"]["transformers_mean_error"] == 0
    assert agreement["torch.bfloat16"]["transformers_mean_error"] > 0
    assert agreement["torch.bfloat16"]["logprob_mean_error"] > agreement["torch.float32"]["logprob_mean_error"]
    assert "tiny/4" in run.stdout
