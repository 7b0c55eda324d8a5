"""What our training step costs over bare fully_shard: tokens per second of TrainEngine and of a loop written by hand.

Two gloo ranks of one thread each hold both sides: the same model, the same rows of equal length, the same precision,
optimizer and clipping. They take turns of a few steps (A B B A ...), and must agree on the loss of the first steps. The
peer is peers/bare_fsdp.py; its rows need no padding, so it computes no token that ours does not. In bfloat16 it rounds
its logits to bfloat16, and ours projects them in float32.

    python -m benchmarks.fsdp_overhead
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import paired_ratios, report, small_qwen3
from benchmarks.peers.bare_fsdp import BareTraining
from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.controller.launch import launch
from shardwise.controller.process_group import Rank, process_group
from shardwise.data import pack
from shardwise.engine import TrainEngine
from shardwise.recipes.losses import sft_loss
from shardwise.types import Denominators, Sample

VOCAB = 2048
LEARNING_RATE = 2e-5
NUM_RANKS = 2
SIDES = ("ours", "bare")
NUM_CHECKED_STEPS = 3
LOSS_BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}
"""How far the two sides' losses may be apart: in bfloat16 the peer rounds each logit (0.03 nats at a logit of 8)."""


def our_step(folder: Path, dtype: str) -> Callable[[Tensor], float]:
    """TrainEngine with default options; a step maps this rank's rows [B, L] to its share of the mean loss."""
    config = EngineConfig.load(None, [f"param_dtype={dtype}", f"max_tokens_per_micro_batch={2**20}"])
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE)
    engine = TrainEngine.build(folder, config, device=torch.device("cpu"), optimizer=optimizer)

    def step(rows: Tensor) -> float:
        loss_mask = torch.arange(rows.shape[1]) > 0
        samples = [Sample(uid=str(place), token_ids=row, loss_mask=loss_mask) for place, row in enumerate(rows)]
        packed = pack(samples, num_shards=1, max_tokens=config.max_tokens_per_micro_batch)
        whole = Denominators(
            num_tokens=packed.denominators.num_tokens * NUM_RANKS,
            num_sequences=packed.denominators.num_sequences * NUM_RANKS,
        )
        metrics = engine.forward_backward(packed.shards[0], sft_loss, whole)
        engine.optim_step()
        return metrics["train/loss"].result() * NUM_RANKS

    return step


def rank_main(folder: Path, dtype: str, args: argparse.Namespace) -> None:
    """One rank: checks the losses, then times both sides turn by turn; rank 0 writes what it measured."""
    torch.set_num_threads(1)
    rank = Rank.from_environment()
    generator = torch.Generator().manual_seed(rank.rank)
    batches = [torch.randint(3, VOCAB, (args.rows, args.seq), generator=generator) for _ in range(8)]
    with process_group(rank, device_type="cpu", timeout_seconds=600):
        peer = BareTraining(folder, param_dtype=getattr(torch, dtype), learning_rate=LEARNING_RATE)
        sides = dict(zip(SIDES, (our_step(folder, dtype), peer.step), strict=True))
        losses = {
            side: [mean_over_ranks(step(rows)) for rows in batches[:NUM_CHECKED_STEPS]] for side, step in sides.items()
        }
        check_losses(losses, dtype)
        turns = [timed_turn(sides, batches, turn, args.steps_per_turn) for turn in range(args.rounds)]
        if rank.rank == 0:
            measured = {
                "seconds": {side: [turn[side][0] for turn in turns] for side in sides},
                "cpu_seconds": {side: [turn[side][1] for turn in turns] for side in sides},
                "tokens_per_turn": NUM_RANKS * args.rows * args.seq * args.steps_per_turn,
                "first_losses": losses,
            }
            (folder / "measured.json").write_text(json.dumps(measured))


def timed_turn(
    sides: Mapping[str, Callable[[Tensor], float]], batches: Sequence[Tensor], turn: int, num_steps: int
) -> dict[str, tuple[float, float]]:
    """Of each side, for `num_steps` steps: seconds from when all ranks start to when all are done, and CPU seconds of
    this rank. The second hardly changes when other work shares the cores."""
    seconds = {}
    for side in list(sides)[:: 1 if turn % 2 == 0 else -1]:
        dist.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        for index in range(num_steps):
            sides[side](batches[index % len(batches)])
        dist.barrier()
        seconds[side] = time.perf_counter() - start, time.process_time() - start_cpu
    return seconds


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / NUM_RANKS


def check_losses(losses: Mapping[str, Sequence[float]], dtype: str) -> None:
    """The first losses also compare what the steps in between did to the weights."""
    worst = max(abs(ours - bare) for ours, bare in zip(losses["ours"], losses["bare"], strict=True))
    assert worst < LOSS_BOUNDS[dtype], f"the sides do not compute the same loss: {losses}"


def measure(dtype: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Starts the ranks on a random model in a folder of its own and reads what rank 0 wrote."""
    from transformers import Qwen3ForCausalLM

    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        Qwen3ForCausalLM(small_qwen3(VOCAB)).save_pretrained(name)
        os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, "-m", "benchmarks.fsdp_overhead", *arguments, "--folder", name, "--dtype", dtype]
        if launch(command, nproc=NUM_RANKS):
            raise SystemExit(f"the ranks of {dtype} failed")
        measured: dict[str, Any] = json.loads((Path(name) / "measured.json").read_text())
    return measured


def summarize(measured: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Ratios of wall-clock and of CPU time, and what they are made of."""
    rates, cpu_rates = (
        {side: [measured["tokens_per_turn"] / seconds for seconds in measured[clock][side]] for side in SIDES}
        for clock in ("seconds", "cpu_seconds")
    )
    ours, bare = SIDES
    return {
        f"{name}_ratio": paired_ratios(rates[ours], rates[bare]),
        f"{name}_cpu_ratio": paired_ratios(cpu_rates[ours], cpu_rates[bare]),
        f"{name}_tokens_per_second": {side: round(statistics.median(rates[side])) for side in SIDES},
        f"{name}_first_losses": measured["first_losses"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="training step against bare fully_shard, tokens per second")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps-per-turn", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8, help="sequences of one rank and optimizer step")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # this process is a rank
    parser.add_argument("--dtype", choices=list(LOSS_BOUNDS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        rank_main(args.folder, args.dtype, args)
        return
    settings = {name: getattr(args, name) for name in ("rounds", "steps_per_turn", "rows", "seq")}
    arguments = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    model = "Qwen3, hidden 256, 4 layers, 4 heads, 2 kv heads, intermediate 768, tied; vocab 2048"
    values: dict[str, Any] = {"settings": {"model": model, "ranks": NUM_RANKS, "threads_per_rank": 1, **settings}}
    ratios = {}
    for dtype in LOSS_BOUNDS:
        measured = measure(dtype, arguments)
        name = "bare_fully_shard" if dtype == "float32" else f"bare_fully_shard_{dtype}"
        values |= summarize(measured, name)
        ratios[name] = values[f"{name}_ratio"]["median"]
        print(f"{name}: {values[f'{name}_ratio']} CPU: {values[f'{name}_cpu_ratio']}", flush=True)
    report("fsdp_overhead", ratios=ratios, memory_ratios={}, values=values, write=not args.no_write)


if __name__ == "__main__":
    main()
