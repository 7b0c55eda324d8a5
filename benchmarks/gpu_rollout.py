"""Generation with Qwen3 shapes on one device: the embedded engine against model.generate and against the memory bound.

    python -m benchmarks.gpu_rollout [--models 0.6b 4b] [--rows 1 64 256] [--prompt-tokens 512] [--new-tokens 128]
        [--compile-decode] [--out FILE]
    python -m benchmarks.gpu_rollout --device cpu --models tiny --rows 4 --prompt-tokens 12 --new-tokens 8    # anywhere

A cell is a model with random weights in bfloat16 and a number of rows that are decoded at a time, in groups of
--group-size with one prompt. No completion ends early, so both sides do the same work; ours returns logprobs too. Both
use the same weights in memory. The sides take turns, in an order that changes from round to round, after a warm-up.

A decode step is what is left of --new-tokens when the time of the same prompts with one new token is taken off, so that
reading the prompts, which ours does once for each group, does not count. `bound` is its share of the least time: every
matrix and the keys and values of every row read once at the best rate at which this run could read or copy memory, or
the step's FLOPs at the rate of its best bfloat16 matrix product, whichever takes longer (limits.py). Each row counts
with its own copy of the prompt's keys. The aim is 0.5 at 64 rows.

Before a model is measured, greedy tokens in float32 have to equal those of model.generate, and logprobs in float32
those of a forward pass without a cache; in bfloat16 logprobs have to be about as near to those of the same weights in
float32 as a bfloat16 forward pass is; where they are not, the cells are measured, and the program fails in the end. A
cell that fails or runs out of memory is reported as such, and the figures so far are written after each. Needs torch,
transformers, pydantic, safetensors, pyyaml and xxhash.
"""

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from benchmarks.cells import attempted, exit_if_any_failed, state_of
from benchmarks.gpu_train import best_rate, device_name, matmul_rate, peak_memory
from benchmarks.harness import paired_ratios, report
from benchmarks.limits import QWEN3, ModelShape
from shardwise.engine.mesh import take_device
from shardwise.rollout import EmbeddedEngine
from shardwise.rollout.kv_cache import CACHED_ATTENTION, register_cached_attention
from shardwise.types import GenerateRequest

NEVER = -1
"""The engine's end-of-sequence token: it is not drawn, so no completion ends early. model.generate has none."""
FIRST_TOKEN = 3
CHECKED_DTYPES = (torch.float32, torch.bfloat16)
MAX_LOGPROB_ERROR = 1e-4
"""On average, in nats, beside what rounding explains."""
MAX_ROUNDING = 1.5
"""How far logprobs may be from float32, on average, as a multiple of what a forward pass in the same dtype is."""
MAX_DISTURBED = 5
AIM = 0.5


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table."""

    model: str
    rows: int
    group_size: int
    prompt_tokens: int
    new_tokens: int

    @property
    def name(self) -> str:
        return f"{self.model}/{self.rows}"

    @property
    def shape(self) -> ModelShape:
        return QWEN3[self.model]

    def prompts(self, seed: int) -> list[list[int]]:
        """One for each group."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.rows // self.group_size, self.prompt_tokens)
        return torch.randint(FIRST_TOKEN, self.shape.vocab, shape, generator=generator).tolist()

    @property
    def contexts(self) -> range:
        """What the tokens of each decode step see; the first new token comes with the prompt."""
        return range(self.prompt_tokens + 1, self.prompt_tokens + self.new_tokens)


def build_model(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """From a config alone."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def build_engine(model: PreTrainedModel, *, rows: int, compile_decode: bool = False) -> EmbeddedEngine:
    """On the same weights."""
    register_cached_attention()
    config = type(model.config)(**model.config.to_dict())
    with model.device:
        own = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation=CACHED_ATTENTION).eval()
    own.load_state_dict(model.state_dict(), assign=True)
    own.tie_weights()
    own.generation_config = GenerationConfig(eos_token_id=NEVER)
    return EmbeddedEngine(own, max_rows=rows, device=model.device, compile_decode=compile_decode)


def requests_of(
    prompts: list[list[int]], *, num_completions: int, max_tokens: int, temperature: float = 1.0
) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            uid=str(place),
            prompt_ids=prompt,
            num_completions=num_completions,
            max_tokens=max_tokens,
            temperature=temperature,
        )
        for place, prompt in enumerate(prompts)
    ]


@torch.inference_mode()
def generated(model: PreTrainedModel, prompts: list[list[int]], *, max_tokens: int, do_sample: bool) -> Tensor:
    """[B, N]: new tokens of prompts of equal length, one row for each."""
    input_ids = torch.tensor(prompts, device=model.device)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {"do_sample": False}
    output = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=max_tokens, use_cache=True, **sampling
    )
    return output[:, input_ids.shape[1] :]


@torch.inference_mode()
def logprobs_of(model: PreTrainedModel, prompt: list[int], token_ids: list[int]) -> Tensor:
    """[N] of one forward pass without a cache, its output projection in float32."""
    tokens = torch.tensor([prompt + token_ids], device=model.device)
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    logits = hidden.float() @ model.get_output_embeddings().weight.float().t()
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]


def check_equal(shape: ModelShape, device: torch.device, dtype: torch.dtype, *, num_tokens: int) -> dict[str, float]:
    """Greedy tokens of three prompts against model.generate, and logprobs of sampled ones against float32.

    Returns:
        The share of equal greedy tokens before the first that differs; the largest and the mean error of logprobs, and
        the mean error of those of transformers in the same dtype.
    Raises:
        RuntimeError: tokens part in float32, or logprobs are further off than rounding explains.
    """
    model = build_model(shape, device, dtype)
    exact = model if dtype == torch.float32 else copy.deepcopy(model).float()
    engine = build_engine(model, rows=4)
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 17, 32)
    prompts = [torch.randint(FIRST_TOKEN, shape.vocab, (n,), generator=generator).tolist() for n in lengths]
    greedy = engine.generate(requests_of(prompts, num_completions=1, max_tokens=num_tokens, temperature=0.0))
    equal = 0
    for prompt, (completion,) in zip(prompts, greedy, strict=True):
        (expected,) = generated(model, [prompt], max_tokens=num_tokens, do_sample=False).tolist()
        pairs = zip(completion.token_ids, expected, strict=True)
        equal += next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), num_tokens)
    errors, rounding = [], []
    groups = engine.generate(requests_of(prompts, num_completions=2, max_tokens=num_tokens))
    for prompt, completion in ((prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group):
        truth = logprobs_of(exact, prompt, completion.token_ids)
        errors.append((torch.tensor(completion.logprobs, device=device) - truth).abs())
        rounding.append((logprobs_of(model, prompt, completion.token_ids) - truth).abs())
    found = {
        "greedy_equal_share": equal / (num_tokens * len(prompts)),
        "logprob_max_error": float(torch.cat(errors).max()),
        "logprob_mean_error": float(torch.cat(errors).mean()),
        "transformers_mean_error": float(torch.cat(rounding).mean()),
    }
    parted = dtype == torch.float32 and found["greedy_equal_share"] < 1
    allowed = MAX_LOGPROB_ERROR + MAX_ROUNDING * found["transformers_mean_error"]
    if parted or not found["logprob_mean_error"] <= allowed:
        raise RuntimeError(f"the engine does not compute what the model does, in {dtype}: {found}")
    return found


def timed(device: torch.device, run: Callable[..., object], *arguments: Any) -> float:
    """Seconds until the device is done."""
    gc.collect()
    synchronize(device)
    start = time.perf_counter()
    run(*arguments)
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


class Ours:
    """The embedded engine."""

    def __init__(self, model: PreTrainedModel, cell: Cell, *, compile_decode: bool) -> None:
        self._engine = build_engine(model, rows=cell.rows, compile_decode=compile_decode)
        self._cell = cell

    def __call__(self, prompts: list[list[int]], max_tokens: int) -> None:
        wanted = requests_of(prompts, num_completions=self._cell.group_size, max_tokens=max_tokens)
        groups = self._engine.generate(wanted)
        assert (
            sum(len(completion.token_ids) for group in groups for completion in group) == self._cell.rows * max_tokens
        )


class Generate:
    """model.generate."""

    def __init__(self, model: PreTrainedModel, cell: Cell) -> None:
        self._model, self._cell = model, cell

    def __call__(self, prompts: list[list[int]], max_tokens: int) -> None:
        repeated = [prompt for prompt in prompts for _ in range(self._cell.group_size)]
        output = generated(self._model, repeated, max_tokens=max_tokens, do_sample=True)
        assert output.shape == (self._cell.rows, max_tokens)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one round of one side."""

    first_token: float
    all_tokens: float

    @property
    def decoding(self) -> float:
        return self.all_tokens - self.first_token


def measure(
    device: torch.device, side: Callable[[list[list[int]], int], None], prompts: list[list[int]], new_tokens: int
) -> Times:
    """One turn of one side, again where something else on the machine took longer than the decoding.

    Raises:
        RuntimeError: the first token alone took longer than all tokens, every time.
    """
    for _ in range(MAX_DISTURBED):
        taken = Times(timed(device, side, prompts, 1), timed(device, side, prompts, new_tokens))
        if taken.decoding > 0:
            return taken
    raise RuntimeError(
        f"{MAX_DISTURBED} times in a row {new_tokens} tokens took no longer than the first of them: the machine is "
        "busy, or --new-tokens is too small to be told from noise"
    )


def run_cell(cell: Cell, model: PreTrainedModel, *, rounds: int, compile_decode: bool) -> dict[str, Any]:
    """Builds the sides, warms up, lets them take turns; the figures of the cell."""
    device = model.device
    sides: dict[str, Callable[[list[list[int]], int], None]]
    sides = {"ours": Ours(model, cell, compile_decode=compile_decode), "generate": Generate(model, cell)}
    times: dict[str, list[Times]] = {name: [] for name in sides}
    peaks: dict[str, dict[str, float]] = {}
    names = list(sides)
    for turn in range(rounds + 1):  # the first is the warm-up
        prompts = cell.prompts(seed=turn)
        for name in names if turn % 2 else names[::-1]:
            if device.type != "cpu":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            taken = measure(device, sides[name], prompts, cell.new_tokens)
            if turn:
                times[name].append(taken)
            peaks[name] = peak_memory(device)
    num_decoded = cell.rows * (cell.new_tokens - 1)
    rates = {name: [num_decoded / each.decoding for each in found] for name, found in times.items()}
    return {
        "ratio": paired_ratios(rates["ours"], rates["generate"]),
        "ratio_with_prompts": paired_ratios(
            *([1 / each.all_tokens for each in times[name]] for name in ("ours", "generate"))
        ),
        **{f"{name}_tokens_per_second": round(statistics.median(found)) for name, found in rates.items()},
        **{f"{name}_step_ms": round(1000 * cell.rows / statistics.median(found), 3) for name, found in rates.items()},
        **{
            f"{name}_first_token_ms": round(1000 * statistics.median(each.first_token for each in found), 2)
            for name, found in times.items()
        },
        "slowest_step_ms": round(1000 * cell.rows / min(rates["ours"]), 3),
        **{f"{name}_{key}": value for name, peak in peaks.items() for key, value in peak.items()},
    }


def attempt(
    cell: Cell, model: PreTrainedModel, args: argparse.Namespace, *, bandwidth: float, flops: float
) -> dict[str, Any]:
    """The figures of a cell beside the bound; or that it failed or ran out of memory."""
    least = cell.shape.decode_seconds(
        cell.rows, cell.contexts, bytes_per_second=bandwidth, flops_per_second=flops
    ) / len(cell.contexts)
    figures: dict[str, Any] = {"bound_step_ms": round(1000 * least, 4)}
    figures |= attempted(lambda: run_cell(cell, model, rounds=args.rounds, compile_decode=args.compile_decode))
    if "ours_step_ms" in figures:
        figures["bound"] = round(1000 * least / figures["ours_step_ms"], 4)
    return figures


@torch.no_grad()
def memory_rate(device: torch.device, *, seconds: float) -> float:
    """Bytes per second of the faster of copying (which reads and writes) and summing (which reads) a large tensor."""
    num_bytes = 2**28 if device.type == "cpu" else 2**32
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for traffic, run in ((2, lambda: target.copy_(source)), (1, source.sum)):

        def measure(traffic: int = traffic, run: Callable[[], object] = run) -> float:
            return traffic * num_bytes / timed(device, run)

        measure()
        best = max(best, best_rate(measure, seconds=seconds / 2))
    return best


def checks(shape: ModelShape, args: argparse.Namespace, device: torch.device) -> dict[str, dict[str, Any]]:
    """What `check_equal` finds in each dtype, or why it fails."""
    agreement = {}
    for dtype in CHECKED_DTYPES:
        agreement[str(dtype)] = attempted(partial(check_equal, shape, device, dtype, num_tokens=args.check_tokens))
        free(device)
    return agreement


def run_cells(
    name: str, args: argparse.Namespace, device: torch.device, *, bandwidth: float, flops: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measures a model's cells, as far as time is left."""
    model = build_model(QWEN3[name], device, torch.bfloat16)
    for rows in args.rows:
        group_size = min(args.group_size, rows)
        cell = Cell(name, rows - rows % group_size, group_size, args.prompt_tokens, args.new_tokens)
        if time.monotonic() - args.started > args.budget_seconds:
            yield cell.name, {"skipped": "no time left"}
            continue
        figures = attempt(cell, model, args, bandwidth=bandwidth, flops=flops)
        free(device)
        print_table({cell.name: figures})
        yield cell.name, figures


def free(device: torch.device) -> None:
    gc.collect()
    torch._dynamo.reset()
    if device.type != "cpu":
        torch.cuda.empty_cache()


COLUMNS = ("bound", "ratio", "ratio_with_prompts", "ours_tokens_per_second", "ours_step_ms", "generate_step_ms")


def print_table(results: Mapping[str, Mapping[str, Any]]) -> None:
    for name, figures in results.items():
        shown = {key: value["median"] if isinstance(value, dict) else value for key, value in figures.items()}
        row = " ".join(f"{shown.get(column, ''):>23}" for column in (*COLUMNS, "bound_step_ms"))
        memory = shown.get("ours_peak_allocated_gib", shown.get("ours_peak_process_gib", state_of(figures)))
        print(f"{name:12} {row} {memory:>13}", flush=True)


def print_header() -> None:
    row = " ".join(f"{column:>23}" for column in (*COLUMNS, "bound_step_ms"))
    print(f"{'model/rows':12} {row} {'peak_gib':>13}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="generation with Qwen3 shapes on one device against its memory bound")
    parser.add_argument("--models", nargs="+", choices=list(QWEN3), default=["0.6b", "4b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64, 256], help="decoded at a time")
    parser.add_argument("--group-size", type=int, default=8, help="completions of one prompt")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128, help="of each completion; at least 2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile-decode", action="store_true", help="rollout.engine.compile_decode, on our side")
    parser.add_argument("--check-tokens", type=int, default=32, help="new tokens of each prompt of the checks")
    parser.add_argument("--device", help="cpu to try the benchmark where there is no GPU")
    parser.add_argument("--budget-seconds", type=float, default=540, help="no cell begins later")
    parser.add_argument("--sweep-seconds", type=float, default=3, help="for each of the two rates of the device")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu_rollout.json")
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    if args.new_tokens < 2:
        parser.error(f"--new-tokens {args.new_tokens}: the first comes with the prompt; use at least 2")
    return args


def main() -> None:
    args = parse_arguments()
    args.started = time.monotonic()
    device = take_device(0) if args.device is None else torch.device(args.device)
    if device.type == "cpu" and args.device is None:
        raise SystemExit("no GPU here; --device cpu --models tiny runs the same path on a CPU")
    bandwidth = memory_rate(device, seconds=args.sweep_seconds)
    free(device)
    flops = matmul_rate(device, seconds=args.sweep_seconds)
    free(device)
    print(f"{device_name(device)}: memory {bandwidth / 1e9:.4g} GB/s, matrix product {flops / 1e12:.3g} TFLOP/s")
    print_header()
    rates = {"memory_gigabytes_per_second": round(bandwidth / 1e9, 1), "matmul_teraflops": round(flops / 1e12, 3)}
    agreement: dict[str, dict[str, dict[str, Any]]] = {}
    results: dict[str, dict[str, Any]] = {}
    for name in args.models:
        agreement[name] = checks(QWEN3[name], args, device)
        print(f"{name}: {agreement[name]}", flush=True)
        for cell, figures in run_cells(name, args, device, bandwidth=bandwidth, flops=flops):
            results[cell] = figures
            report_cells(results, agreement, args, device, rates, quiet=True)
    print("\nAll cells:")
    print_header()
    print_table(results)
    report_cells(results, agreement, args, device, rates)
    checked = {f"{name} in {dtype}": found for name, each in agreement.items() for dtype, found in each.items()}
    exit_if_any_failed(results | checked)


def report_cells(
    results: Mapping[str, Mapping[str, Any]],
    agreement: Mapping[str, Any],
    args: argparse.Namespace,
    device: torch.device,
    rates: Mapping[str, float],
    *,
    quiet: bool = False,
) -> None:
    measured = {name: figures for name, figures in results.items() if "bound" in figures}
    ratios = {f"bound/{name}": figures["bound"] for name, figures in measured.items()}
    ratios |= {f"generate/{name}": figures["ratio"]["median"] for name, figures in measured.items()}
    memory = {
        f"generate/{name}": round(figures["ours_peak_allocated_gib"] / figures["generate_peak_allocated_gib"], 3)
        for name, figures in measured.items()
        if "ours_peak_allocated_gib" in figures
    }
    settings = ("group_size", "prompt_tokens", "new_tokens", "rounds", "compile_decode", "check_tokens")
    values = {
        "device": device_name(device),
        **rates,
        "aim": {"bound": AIM, "rows": 64},
        "settings": {key: getattr(args, key) for key in settings},
        "agreement": dict(agreement),
        "cells": dict(results),
    }
    write = not args.no_write
    report("gpu_rollout", ratios=ratios, memory_ratios=memory, values=values, write=write, out=args.out, quiet=quiet)


if __name__ == "__main__":
    main()
