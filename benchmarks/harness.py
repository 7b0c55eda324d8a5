"""What every benchmark shares: paired rounds, the numbers they are summed up to, where results go."""

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import Qwen3Config

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "trl", "shardwise")


def paired_ratios(ours: Sequence[float], peer: Sequence[float]) -> dict[str, float]:
    """Ratios ours / peer of rounds that ran next to each other, so that a slow minute of the machine hits both.

    Args:
        ours, peer: one rate (tokens per second) of each round.
    Returns:
        The median, which is the headline, the smallest and the largest.
    """
    ratios = [mine / theirs for mine, theirs in zip(ours, peer, strict=True)]
    return {
        "median": round(statistics.median(ratios), 3),
        "min": round(min(ratios), 3),
        "max": round(max(ratios), 3),
        "rounds": len(ratios),
    }


def machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers: never the name of the machine or a path on it."""
    return {
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),  # over five minutes: more than the benchmark's own processes?
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Of the packages this interpreter has."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def report(
    name: str,
    *,
    ratios: Mapping[str, float],
    memory_ratios: Mapping[str, float],
    values: Mapping[str, Any],
    write: bool = True,
    out: Path | None = None,
    quiet: bool = False,
) -> None:
    """Writes results/NAME.json (or `out`), and prints the result as the last line, unless `quiet`.

    Args:
        ratios: ours / peer of tokens per second, the medians of paired rounds; a peer that did not run is left out.
        memory_ratios: ours / peer of peak memory.
        values: everything else: settings, spreads, absolute numbers, notes.
    """
    result = {"benchmark": name, "ratios": dict(ratios), "memory_ratios": dict(memory_ratios), "values": dict(values)}
    if write:
        path = RESULTS / f"{name}.json" if out is None else out
        path.parent.mkdir(parents=True, exist_ok=True)
        stamped = {"date": datetime.now(UTC).date().isoformat(), "machine": machine(), "versions": versions(), **result}
        path.write_text(json.dumps(stamped, indent=2) + "\n", encoding="utf-8")
    if not quiet:
        print(json.dumps(result))


def small_qwen3(vocab_size: int, **larger: int) -> Qwen3Config:
    """The model of every benchmark here: 3.1M parameters beside the (tied) embeddings; token 0 pads, token 1 ends.

    Args:
        larger: sizes to use instead, by the names of Qwen3Config.
    """
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return Qwen3Config(
        vocab_size=vocab_size,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **(sizes | larger),
    )
