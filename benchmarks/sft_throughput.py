"""Supervised fine-tuning: real tokens per second and peak memory of TrainEngine, TRL's SFTTrainer and a bare loop.

Every side is a process of its own on the same model, rows, dtype (float32), threads and sequences per optimizer step;
they take turns of a few steps each (A B C A B C ...). Padding is not counted as tokens. Memory is the peak resident set
of the whole process with a vocabulary of 151,936, where logits decide, one side at a time.

TRL runs where it is installed: in --peer-python (see peers/requirements.txt), or here. Without it its
ratios are left out.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import paired_ratios, report, small_qwen3
from benchmarks.peers.lockstep import Child

LARGE_VOCAB = 151_936
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Task:
    """What every side trains on."""

    folder: Path
    batch: int
    seq: int
    steps: int
    threads: int


def build_task(folder: Path, *, vocab_size: int, batch: int, seq: int, steps: int, threads: int) -> Task:
    """Saves a random Qwen3, a tokenizer and rows of random tokens, lengths uniform in [seq / 8, seq]."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(small_qwen3(vocab_size)).save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    rng = random.Random(1)
    rows = [[rng.randrange(3, vocab_size) for _ in range(rng.randint(seq // 8, seq))] for _ in range(batch * steps)]
    (folder / "rows.json").write_text(json.dumps(rows))
    return Task(folder, batch, seq, steps, threads)


def start(side: str, task: Task, peer_python: str | None) -> Child:
    """One side's process, loaded and waiting."""
    common = ["--folder", str(task.folder), "--threads", str(task.threads), "--batch"]
    match side:
        case "ours":
            return Child(sys.executable, "benchmarks.sft_worker", [*common, str(task.batch)], threads=task.threads)
        case "bare" | "bare_no_mask":
            flag = "--mask" if side == "bare" else "--no-mask"
            arguments = [*common, str(task.batch), flag]
            return Child(sys.executable, "benchmarks.peers.bare_sft", arguments, threads=task.threads)
        case "trl" | "trl_packed" | "trl_padding_free":
            assert peer_python is not None
            # Rows of a packed batch are full: fewer of them hold the tokens of `batch` sequences of mean 9/16 seq.
            rows = round(task.batch * 9 / 16) if side == "trl_packed" else task.batch
            mode = {"trl": "padded", "trl_packed": "packed", "trl_padding_free": "padding_free"}[side]
            arguments = [*common, str(rows), "--seq", str(task.seq), "--steps", str(task.steps), "--mode", mode]
            return Child(peer_python, "benchmarks.peers.trl_sft", arguments, threads=task.threads)
        case _:
            raise ValueError(side)


def find_peer(peer_python: str | None) -> str | None:
    """The interpreter that imports trl: the one that was given, or this one; None if it does not."""
    python = peer_python or sys.executable
    found = subprocess.run([python, "-c", "import trl"], capture_output=True, check=False).returncode == 0
    if peer_python is not None and not found:
        raise SystemExit(f"--peer-python {peer_python} cannot import trl; see benchmarks/peers/requirements.txt")
    return python if found else None


def measure_throughput(
    sides: Sequence[str], task: Task, peer_python: str | None, *, rounds: int, steps_per_turn: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens per second, and per CPU second, of each side in each round; they take turns, in rotating order.

    CPU seconds hardly change when other work shares the cores: their ratio shows what a busy machine did to the
    first.
    """
    children = {side: start(side, task, peer_python) for side in sides}
    first_losses = {side: child.steps(3)["losses"] for side, child in children.items()}  # warm-up
    check_losses(first_losses)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    cpu_rates: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds):
        order = list(sides[turn % len(sides) :]) + list(sides[: turn % len(sides)])
        for side in order:
            answer = children[side].steps(steps_per_turn)
            rates[side].append(answer["tokens"] / answer["seconds"])
            cpu_rates[side].append(answer["tokens"] / answer["cpu_seconds"])
    for child in children.values():
        child.finish()
    return rates, cpu_rates


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """The sides train the same model on the same batches, so the first loss agrees. TRL logs one step late."""
    unpacked = {side: values for side, values in losses.items() if side != "trl_packed"}
    first = {side: values[1 if side.startswith("trl") else 0] for side, values in unpacked.items()}
    spread = max(first.values()) - min(first.values())
    assert spread < 1e-3, f"the sides do not compute the same loss: {first}"


def measure_memory(sides: Sequence[str], task: Task, peer_python: str | None) -> dict[str, dict[str, float]]:
    """Peak resident memory of the whole process, and its growth over the loaded model, one side at a time."""
    memory = {}
    for side in sides:
        child = start(side, task, peer_python)
        answer = child.steps(task.steps - 1)  # the last rows may not fill a packed batch
        peak = child.finish()
        memory[side] = {
            "peak_gib": round(peak["peak_bytes"] / GIB, 3),
            "growth_gib": round((peak["peak_bytes"] - peak["loaded_bytes"]) / GIB, 3),
            "tokens_per_second": round(answer["tokens"] / answer["seconds"], 1),
        }
        print(f"memory {side}: {memory[side]}", flush=True)
    return memory


def main() -> None:
    parser = argparse.ArgumentParser(description="SFT tokens per second and peak memory against TRL and a bare loop")
    parser.add_argument("--peer-python", help="the interpreter that has trl; default: this one, if it has")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps-per-turn", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="sequences of one optimizer step")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    args = parser.parse_args()
    peer = find_peer(args.peer_python)
    values: dict[str, Any] = {
        "settings": {
            "model": "Qwen3, hidden 256, 4 layers, 4 heads, 2 kv heads, intermediate 768, tied; vocab 2048",
            "batch_sequences": args.batch,
            "seq": args.seq,
            "lengths": "uniform in [seq / 8, seq]",
            "dtype": "float32",
            "threads": args.threads,
        }
    }
    trl_sides = ["trl", "trl_packed", "trl_padding_free"] if peer else []
    if not peer:
        values["note"] = "trl is not installed here and --peer-python was not given: its ratios are left out"
    ratios, memory_ratios = {}, {}
    with tempfile.TemporaryDirectory() as name:
        # Packing takes more rows for a step of as many tokens; a generous number of rows serves all sides.
        steps = 2 * (3 + args.rounds * args.steps_per_turn)
        common = {"batch": args.batch, "seq": args.seq, "threads": args.threads}
        small = build_task(Path(name) / "small", vocab_size=2048, steps=steps, **common)
        sides = ["ours", "bare", "bare_no_mask", *trl_sides]
        rates, cpu_rates = measure_throughput(
            sides, small, peer, rounds=args.rounds, steps_per_turn=args.steps_per_turn
        )
        for side in sides:
            values[f"{side}_tokens_per_second"] = round(statistics.median(rates[side]))
            if side != "ours":
                values[f"{side}_ratio"] = paired_ratios(rates["ours"], rates[side])
                values[f"{side}_cpu_ratio"] = paired_ratios(cpu_rates["ours"], cpu_rates[side])
                ratios[side] = values[f"{side}_ratio"]["median"]
                print(f"{side}: {values[f'{side}_ratio']} CPU: {values[f'{side}_cpu_ratio']}", flush=True)
        if args.memory:
            large = build_task(Path(name) / "large", vocab_size=LARGE_VOCAB, steps=4, **common)
            memory = measure_memory(["ours", "bare", *trl_sides], large, peer)
            values["memory_at_vocab_151936"] = memory
            memory_ratios = {
                side: round(memory["ours"]["peak_gib"] / figures["peak_gib"], 3)
                for side, figures in memory.items()
                if side != "ours"
            }
            values["memory_growth_ratios"] = {
                side: round(memory["ours"]["growth_gib"] / figures["growth_gib"], 3)
                for side, figures in memory.items()
                if side != "ours"
            }
    report("sft_throughput", ratios=ratios, memory_ratios=memory_ratios, values=values, write=not args.no_write)


if __name__ == "__main__":
    main()
