"""Training steps of Qwen3 shapes on one device: tokens/s and the share of what its matrix units can do (MFU).

    python -m benchmarks.gpu_train [--models 0.6b 4b 8b] [--tokens 8192 16384 65536] [--steps 10]
        [--option activation_checkpointing=full] [--option optimizer.optimizer=adamw_8bit] [--out FILE]
    python -m benchmarks.gpu_train --device cpu --models tiny --tokens 256      # the same path, on any machine

A cell is a model, a number of tokens of one micro-batch, and how they are cut into documents: one, or packed documents
of 4,096 tokens. A step is TrainEngine's forward_backward of one micro-batch (every token but the first of a document is
trained) and its optim_step, at a world size of 1, with random weights that no file holds. Each cell trains with the
options that the memory formulas of limits.py say are enough; --option overrides them.

MFU is exact model FLOPs (causal attention over each document, nothing computed twice counted) divided by the best rate
of a bfloat16 matrix product that this run measured, so 1.0 cannot be reached. Times are medians of steps, split by
events on the device's own stream. A cell that fails or runs out of memory is reported as such, and the figures so far
are written after each. Needs torch, transformers,
pydantic, safetensors, pyyaml and nothing else.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.cells import attempted, exit_if_any_failed, state_of
from benchmarks.harness import report
from benchmarks.limits import QWEN3, ModelShape
from benchmarks.peers.lockstep import memory_bytes
from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.controller.process_group import Rank, process_group
from shardwise.data.packing import PackedStep, pack
from shardwise.engine import TrainEngine
from shardwise.engine.mesh import ParallelDims, take_device
from shardwise.engine.model import build_unloaded
from shardwise.engine.optim.optimizer import ShardedOptimizer
from shardwise.recipes.losses import sft_loss
from shardwise.types import Denominators, Metrics, Sample, TokenBatch, TokenOutputs

GIB = 2**30
DOCUMENT_TOKENS = 4096
MEMORY_SHARE = 0.8
"""Of the device: what a cell's estimate may take. Fragmentation, NCCL and the CUDA context take some too."""
MEMORY_LADDER: tuple[list[str], ...] = (
    [],
    ["activation_checkpointing=selective"],
    ["activation_checkpointing=full"],
    ["activation_checkpointing=full", "apply_tiled_mlp=true"],
    ["activation_checkpointing=full", "apply_tiled_mlp=true", "activation_offload=true"],
)
"""Each holds less than the one before, and takes longer."""
EXPECTED_MFU = 0.25
CELL_SECONDS = 20.0
"""What a cell takes beside its steps: building, warming up, profiling."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table."""

    model: str
    num_tokens: int
    document_tokens: int
    variant: tuple[str, ...] = ()
    """Options beyond those that memory asks for."""

    @property
    def name(self) -> str:
        documents = "one" if self.document_tokens == self.num_tokens else f"{self.document_tokens}s"
        return "/".join([self.model, str(self.num_tokens), documents, *self.variant])

    @property
    def lengths(self) -> list[int]:
        count, rest = divmod(self.num_tokens, self.document_tokens)
        return [self.document_tokens] * count + ([rest] if rest else [])

    @property
    def flops(self) -> int:
        """Of one training step; the first token of a document is not trained."""
        return QWEN3[self.model].train_flops(self.lengths, self.num_tokens - len(self.lengths))


def cells(models: Sequence[str], tokens: Sequence[int]) -> Iterator[Cell]:
    """Small models first; the shortest kernels (0.6b, fewest tokens) also with compiled layers, where it pays most."""
    for model in models:
        for num_tokens in tokens:
            for document in dict.fromkeys((num_tokens, min(DOCUMENT_TOKENS, num_tokens))):
                yield Cell(model, num_tokens, document)
                if model == "0.6b" and num_tokens == min(tokens):
                    yield Cell(model, num_tokens, document, ("compile_layers=true",))


def default_options(shape: ModelShape, num_tokens: int, memory: float) -> list[str]:
    """The fastest options whose estimate fits: float32 masters if they leave half of the memory to the rest."""
    masters = "float32" if 16 * shape.num_parameters < memory / 2 else "bfloat16"
    common = ["param_dtype=bfloat16", f"master_dtype={masters}"]
    for step in MEMORY_LADDER:
        if shape.estimated_bytes(engine_config([*common, *step]), num_tokens) < MEMORY_SHARE * memory:
            break
    return [*common, *step]


def engine_config(options: Sequence[str]) -> EngineConfig:
    return EngineConfig.load(None, [option for option in options if not option.startswith("optimizer.")])


def optimizer_config(options: Sequence[str]) -> OptimizerConfig:
    own = [option.removeprefix("optimizer.") for option in options if option.startswith("optimizer.")]
    return OptimizerConfig.load(None, ["learning_rate=1e-5", *own])


@torch.no_grad()
def build_engine(shape: ModelShape, options: Sequence[str], device: torch.device) -> TrainEngine:
    """From a config alone: matrices are drawn from a normal distribution, norms are 1."""
    config = engine_config(options)
    with tempfile.TemporaryDirectory() as folder:
        shape.config().save_pretrained(folder)
        dims = ParallelDims.from_sizes(world_size=dist.get_world_size(), fsdp_size=None, ulysses_size=1)
        sharded = build_unloaded(Path(folder), config, dims.build(device.type), device=device)
    for parameter in sharded.model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.dim() > 1:
            local.normal_(0.0, 0.02)
        else:
            local.fill_(1.0)
    optimizer = ShardedOptimizer(sharded.model.hf_model, optimizer_config(options), total_steps=1)
    return TrainEngine(sharded, optimizer, config=config, device=device, seed=0)


def random_pack(cell: Cell) -> PackedStep:
    vocab = QWEN3[cell.model].vocab
    samples = []
    for place, length in enumerate(cell.lengths):
        tokens = torch.randint(3, vocab, (length,))
        samples.append(Sample(uid=str(place), token_ids=tokens, loss_mask=torch.arange(length) > 0))
    return pack(samples, num_shards=1, max_tokens=cell.num_tokens)


class Clock:
    """Moments on the device's stream; on a CPU, where work is done when a call returns, wall-clock moments."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Waits for the device."""
        if self._device.type == "cpu":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


PARTS = ("forward", "backward", "optimizer")


def timed_step(engine: TrainEngine, packed: PackedStep, clock: Clock) -> dict[str, float]:
    """Seconds of one optimizer step and of its parts. The loss itself is small and counts as backward."""
    moments = [clock.now()]

    def loss_fn(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        moments.append(clock.now())
        return sft_loss(outputs, batch, denominators)

    engine.forward_backward(packed.shards[0], loss_fn, packed.denominators)
    moments.append(clock.now())
    engine.optim_step()
    moments.append(clock.now())
    pairs = zip(PARTS, moments[:-1], moments[1:], strict=True)
    return {part: clock.seconds(start, end) for part, start, end in pairs} | {
        "step": clock.seconds(moments[0], moments[-1])
    }


def run_cell(cell: Cell, options: Sequence[str], device: torch.device, *, num_steps: int) -> dict[str, Any]:
    """Builds, warms up, times `num_steps` steps; the figures of the cell."""
    engine = build_engine(QWEN3[cell.model], options, device)
    packed, clock = random_pack(cell), Clock(device)
    for _ in range(2):  # the first one allocates the optimizer's states (and compiles)
        timed_step(engine, packed, clock)
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats()
    steps = [timed_step(engine, packed, clock) for _ in range(num_steps)]
    medians = {part: statistics.median(step[part] for step in steps) for part in ("step", *PARTS)}
    if cell.model in ("tiny", "0.6b"):
        print_top_kernels(lambda: timed_step(engine, packed, clock), device)
    return {
        "tokens_per_second": round(cell.num_tokens / medians["step"]),
        "teraflops": round(cell.flops / medians["step"] / 1e12, 3),
        **{f"{part}_ms": round(1000 * seconds, 2) for part, seconds in medians.items()},
        "slowest_step_ms": round(1000 * max(step["step"] for step in steps), 2),
        "num_steps": num_steps,
        **peak_memory(device),
    }


def peak_memory(device: torch.device) -> dict[str, float]:
    if device.type == "cpu":
        return {"peak_process_gib": round(memory_bytes("VmHWM") / GIB, 3)}
    return {
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
    }


def print_top_kernels(step: Callable[[], object], device: torch.device) -> None:
    """Where one step's device time goes, kernel by kernel (on a CPU: operation by operation)."""
    on_cpu = device.type == "cpu"
    with profile(activities=[ProfilerActivity.CPU] + ([] if on_cpu else [ProfilerActivity.CUDA])) as profiler:
        step()
        if not on_cpu:
            torch.cuda.synchronize()
    kind, field = (DeviceType.CPU, "self_cpu_time_total") if on_cpu else (DeviceType.CUDA, "self_device_time_total")
    events = [e for e in profiler.key_averages() if e.device_type == kind and not e.is_user_annotation]
    microseconds = {event: getattr(event, field) for event in events}
    total = sum(microseconds.values())
    for event in sorted(events, key=lambda event: -microseconds[event])[:10]:
        spent = microseconds[event]
        print(f"    {spent / total:6.1%} {spent / 1000:9.2f} ms {event.count:6d} x {event.key[:90]}")


def best_rate(measure: Callable[[], float], *, seconds: float) -> float:
    """The best of as many calls as fit into the time."""
    deadline, best = time.monotonic() + seconds, 0.0
    while time.monotonic() < deadline:
        best = max(best, measure())
    return best


@torch.no_grad()
def matmul_rate(device: torch.device, *, seconds: float) -> float:
    """FLOP/s of the best bfloat16 matrix product of random numbers, over a few large square sizes."""
    clock, best = Clock(device), 0.0
    sizes = (512, 1024) if device.type == "cpu" else (4096, 8192, 12288, 16384)
    for size in sizes:
        left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(left)
        num_calls = max(1, int(3e13 / (2 * size**3))) if device.type != "cpu" else 3

        def measure(left: Tensor = left, right: Tensor = right, out: Tensor = out, calls: int = num_calls) -> float:
            start = clock.now()
            for _ in range(calls):
                torch.mm(left, right, out=out)
            return float(2 * len(left) ** 3 * calls / clock.seconds(start, clock.now()))

        measure()
        best = max(best, best_rate(measure, seconds=seconds / len(sizes)))
    return best


def attempt(
    cell: Cell, extra: Sequence[str], device: torch.device, *, rate: float, memory: float, max_steps: int
) -> dict[str, Any]:
    """The figures of a cell, and what the formulas say; or that it failed or ran out of memory, or would."""
    shape = QWEN3[cell.model]
    options = [*default_options(shape, cell.num_tokens, memory), *cell.variant, *extra]
    estimate = shape.estimated_bytes(engine_config(options), cell.num_tokens)
    figures: dict[str, Any] = {
        "options": options,
        "model_teraflop": round(cell.flops / 1e12, 3),
        "estimated_gib": round(estimate / GIB, 1),
    }
    if estimate > memory:  # it would cost its time, and fail in the first optimizer step
        return figures | {"out_of_memory": True}
    num_steps = max(2, min(max_steps, int(CELL_SECONDS / expected_seconds(cell, rate))))
    figures |= attempted(lambda: run_cell(cell, options, device, num_steps=num_steps))
    if "step_ms" in figures:
        figures["mfu"] = round(cell.flops / (figures["step_ms"] / 1000) / rate, 4)
    return figures


def expected_seconds(cell: Cell, rate: float) -> float:
    """Of one step, to plan with."""
    return cell.flops / (EXPECTED_MFU * rate)


def run_cells(
    chosen: Sequence[Cell], args: argparse.Namespace, device: torch.device, *, rate: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every cell for which time is left, one after the other."""
    deadline = args.started + args.budget_seconds
    memory = memory_of(device)
    for cell in chosen:
        if time.monotonic() + CELL_SECONDS + 5 * expected_seconds(cell, rate) > deadline:
            yield cell.name, {"skipped": "no time left"}
            continue
        figures = attempt(cell, args.option, device, rate=rate, memory=memory, max_steps=args.steps)
        print_table({cell.name: figures})
        yield cell.name, figures
        gc.collect()  # FSDP's units and their hooks hold each other
        torch._dynamo.reset()
        if device.type != "cpu":
            torch.cuda.empty_cache()


def memory_of(device: torch.device) -> int:
    """Bytes, all of it."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.cuda.get_device_properties(device).total_memory)


COLUMNS = ("mfu", "tokens_per_second", "step_ms", "forward_ms", "backward_ms", "optimizer_ms", "estimated_gib")


def print_table(results: Mapping[str, Mapping[str, Any]]) -> None:
    for name, figures in results.items():
        memory = figures.get("peak_allocated_gib", figures.get("peak_process_gib", state_of(figures)))
        row = " ".join(f"{figures.get(column, ''):>12}" for column in COLUMNS)
        options = " ".join(figures.get("options", ["param_dtype=bfloat16"])[1:])
        print(f"{name:44} {row} {memory:>13} {figures.get('peak_reserved_gib', ''):>9}  {options}", flush=True)


def print_header() -> None:
    row = " ".join(f"{column[:12]:>12}" for column in COLUMNS)
    print(f"{'model/tokens/documents':44} {row} {'allocated_gib':>13} {'reserved':>9}  options", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="training steps of Qwen3 shapes on one device: tokens/s, MFU, memory")
    parser.add_argument("--models", nargs="+", choices=list(QWEN3), default=["0.6b", "4b", "8b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384, 65536], help="of one micro-batch")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a cell; long ones get fewer")
    parser.add_argument("--option", action="append", default=[], help="engine option, or optimizer.key=value")
    parser.add_argument("--device", help="cpu to try the benchmark where there is no GPU")
    parser.add_argument("--budget-seconds", type=float, default=540, help="cells that would end later are skipped")
    parser.add_argument("--matmul-seconds", type=float, default=5, help="how long the matrix products are swept")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu_train.json")
    parser.add_argument("--no-write", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.started = time.monotonic()
    device = take_device(0) if args.device is None else torch.device(args.device)
    if device.type == "cpu" and args.device is None:
        raise SystemExit("no GPU here; --device cpu --models tiny runs the same path on a CPU")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.manual_seed(0)
    results: dict[str, dict[str, Any]] = {}
    with process_group(Rank.from_environment(), device_type=device.type, timeout_seconds=600):
        rate = matmul_rate(device, seconds=args.matmul_seconds)
        print(f"{device_name(device)}: best bfloat16 matrix product {rate / 1e12:.3g} TFLOP/s", flush=True)
        print_header()
        for name, figures in run_cells(list(cells(args.models, args.tokens)), args, device, rate=rate):
            results[name] = figures
            report_cells(results, args, device, rate=rate, quiet=True)
    print("\nAll cells:")
    print_header()
    print_table(results)
    report_cells(results, args, device, rate=rate)
    exit_if_any_failed(results)


def report_cells(
    results: Mapping[str, Mapping[str, Any]],
    args: argparse.Namespace,
    device: torch.device,
    *,
    rate: float,
    quiet: bool = False,
) -> None:
    values = {"device": device_name(device), "matmul_teraflops": round(rate / 1e12, 3), "cells": dict(results)}
    mfu = {f"mfu/{name}": figures["mfu"] for name, figures in results.items() if "mfu" in figures}
    write = not args.no_write
    report("gpu_train", ratios=mfu, memory_ratios={}, values=values, write=write, out=args.out, quiet=quiet)


def device_name(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)


if __name__ == "__main__":
    main()
