"""Loading and exporting weights: bytes read, peak memory and time on 1, 2 and 4 ranks, against transformers.

A dense and a mixture-of-experts model of 280 and 330 MB in bfloat16 with random weights, written by save_pretrained.
Each measurement has processes of its own; ours and transformers' `from_pretrained` / `save_pretrained` (one process)
take turns. Files to read are in the page cache on both sides, written ones are flushed to the disk on both.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks.harness import paired_ratios, report
from shardwise.controller.launch import STORE_VARIABLE
from shardwise.data.synthetic import train_tokenizer

COMMON = {"vocab_size": 32768, "head_dim": 64, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
MODELS: dict[str, PretrainedConfig] = {
    "dense": Qwen3Config(
        **COMMON,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "mixture": Qwen3MoeConfig(
        **COMMON,
        hidden_size=512,
        moe_intermediate_size=512,
        num_experts=32,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    ),
}


def build_folder(config: PretrainedConfig, folder: Path) -> int:
    """Writes the model with a tokenizer. Returns the bytes of its weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    train_tokenizer(["2+3=5"], vocab_size=261).save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def run_side(side: str, folder: Path, *, num_ranks: int) -> list[dict[str, Any]]:
    """What each rank measured."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "out"
        arguments = ["--side", side, "--folder", str(folder), "--target", str(target)]
        ranks = []
        for rank in range(num_ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                STORE_VARIABLE: str(Path(scratch) / "store"),
                # glibc keeps freed blocks below 32 MiB in its heap. The experts of a layer of a real model are larger.
                "MALLOC_MMAP_THRESHOLD_": "1048576",
            }
            command = [sys.executable, "-m", "benchmarks.loading_worker", *arguments]
            ranks.append(subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True))
        printed = [process.communicate()[0] for process in ranks]
        if any(process.returncode for process in ranks):
            raise RuntimeError(f"{side} on {num_ranks} ranks failed: {[process.returncode for process in ranks]}")
        check_files(folder, target)
        return [json.loads(text.splitlines()[-1]) for text in printed]


def check_files(folder: Path, target: Path) -> None:
    """Both sides write the weights they read, bit by bit."""
    for file in folder.glob("*.safetensors"):
        if file.read_bytes() != (target / file.name).read_bytes():
            raise AssertionError(f"{file.name} was exported with other bytes than it was loaded from")


def compare(folder: Path, num_bytes: int, *, num_ranks: int, rounds: int) -> dict[str, Any]:
    """Figures of the worst rank as shares of the model's bytes, and rates (ours / transformers) of each step."""
    ours: list[list[dict[str, Any]]] = []
    theirs: list[dict[str, Any]] = []
    for _ in range(rounds):
        ours.append(run_side("ours", folder, num_ranks=num_ranks))
        theirs += run_side("theirs", folder, num_ranks=1)
    result: dict[str, Any] = {}
    for step in ("load", "export"):
        peaks = [max(rank[step]["peak_bytes"] for rank in ranks) / num_bytes for ranks in ours]
        seconds = [max(rank[step]["seconds"] for rank in ranks) for ranks in ours]
        their_peaks = [each[step]["peak_bytes"] / num_bytes for each in theirs]
        their_seconds = [each[step]["seconds"] for each in theirs]
        result[step] = {
            "peak_memory_of_a_rank": round(statistics.median(peaks), 3),
            "transformers_peak_memory": round(statistics.median(their_peaks), 3),
            "seconds": round(statistics.median(seconds), 2),
            "transformers_seconds": round(statistics.median(their_seconds), 2),
            "rate_ratio": paired_ratios([1 / s for s in seconds], [1 / s for s in their_seconds]),
        }
    read = max(rank["load"]["bytes_read"] for rank in ours[0]) / num_bytes
    result["load"]["bytes_read_by_a_rank"] = round(read, 4)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    args = parser.parse_args()

    ratios: dict[str, float] = {}
    memory_ratios: dict[str, float] = {}
    values: dict[str, Any] = {
        "settings": {"rounds": args.rounds, "dtype": "bfloat16", "threads_per_rank": 1, "page_cache": "warm"},
        "notes": [
            "Memory and bytes are shares of the model's bytes; a rank's share of the weights is part of its load peak.",
            "from_pretrained maps the files of a dense model: save_pretrained writes from that mapping.",
            "Ranks share two cores and one disk: the times of 2 and 4 ranks say little.",
        ],
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.models:
            folder = Path(scratch) / name
            num_bytes = build_folder(MODELS[name], folder)
            values[f"{name}/model_bytes"] = num_bytes
            for num_ranks in args.ranks:
                key = f"{name}/{num_ranks}_ranks"
                values[key] = found = compare(folder, num_bytes, num_ranks=num_ranks, rounds=args.rounds)
                ratios |= {f"{step}/{key}": found[step]["rate_ratio"]["median"] for step in ("load", "export")}
                load = found["load"]
                mine, peer = load["peak_memory_of_a_rank"], load["transformers_peak_memory"]
                memory_ratios[f"load/{key}"] = round(mine / peer, 3)
                print(key, json.dumps(found), flush=True)
            shutil.rmtree(folder)
    report("loading", ratios=ratios, memory_ratios=memory_ratios, values=values, write=not args.no_write)


if __name__ == "__main__":
    main()
