"""The ratios in docs/benchmarks.md are those of the runs whose results are stored; README.md repeats some of them."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU_RATIO = re.compile(r" \([^)]*\)")
ROLLOUT = "{}/4M/bfloat16/{}", "{}/30M/bfloat16/{}"
STEP = ("step_full", "step_selective", "step_tiled_mlp", "step_full_and_tiled_mlp")
ROWS = [
    ("sft_throughput", ["trl"]),
    ("sft_throughput", ["trl_packed", "trl_padding_free"]),
    ("sft_throughput", ["bare", "bare_no_mask"]),
    ("sft_throughput", ["memory:trl"]),
    ("rollout_throughput", [name.format("generate", "groups_of_8") for name in ROLLOUT]),
    ("rollout_throughput", [name.format("vllm", "groups_of_8") for name in ROLLOUT]),
    ("rollout_throughput", [name.format(peer, "equal") for peer in ("generate", "vllm") for name in ROLLOUT]),
    ("rollout_throughput", ["linear_bound/30M/bfloat16/groups_of_8", "linear_bound/30M/bfloat16/equal"]),
    ("grpo_step", ["trl"]),
    ("grpo_step", ["trl_train"]),
    ("fsdp_overhead", ["bare_fully_shard", "bare_fully_shard_bfloat16"]),
    ("memory", ["memory:full_logits_4096x64", "memory:full_logits_1024x256"]),
    ("memory", [f"memory:{name}" for name in STEP]),
    ("checkpoint", [f"{peer}_{ranks}" for peer in ("torch_save", "dcp", "raw_write") for ranks in (1, 2)]),
    ("checkpoint", ["pause_1", "pause_2"]),
    ("checkpoint", ["verified_load_1", "verified_load_2"]),
    ("checkpoint", ["verified_cold_load_1", "verified_cold_load_2"]),
    ("weight_sync", ["memcpy", "gloo_broadcast"]),
    ("loading", ["memory:load/dense/4_ranks"]),
    ("loading", [f"{way}/dense/{ranks}_ranks" for way in ("load", "export") for ranks in (1, 2, 4)]),
    ("async_speedup", [f"{kind}/max_staleness_1" for kind in ("even", "generation", "ragged")]),
    ("rewards", [f"{kind}/{count}_workers" for kind in ("without_hangs", "one_percent_hang") for count in (2, 4)]),
]
"""Of every line of the table: the stored result, and its ratios in their order."""


def section(path: str, title: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]


def measured() -> list[str]:
    """The middle cells of the table of results, without what stands in parentheses."""
    lines = [line for line in section("docs/benchmarks.md", "Results").splitlines() if line.startswith("|")][2:]
    return [CPU_RATIO.sub("", line.split(" | ")[1]) for line in lines]


def test_every_line_has_its_result():
    assert len(measured()) == len(ROWS)


@pytest.mark.parametrize(("line", "row"), enumerate(ROWS), ids=[f"{name} {keys[0]}" for name, keys in ROWS])
def test_figures_are_those_of_the_stored_run(line, row):
    name, keys = row
    stored = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    ratios = stored["ratios"] | {f"memory:{key}": ratio for key, ratio in stored["memory_ratios"].items()}
    found = re.findall(r"\d+\.\d+", measured()[line])
    assert found[: len(keys)] == [f"{ratios[key]:.2f}" for key in keys]


def test_recovery_takes_the_seconds_of_the_stored_run():
    stored = json.loads((ROOT / "benchmarks" / "results" / "checkpoint.json").read_text(encoding="utf-8"))
    seconds = stored["values"]["recovery_seconds"]["median"]
    assert f"trains its next step {seconds} s after `kill -9`" in section("docs/benchmarks.md", "Results")
    assert seconds <= 20


def test_the_figures_in_the_readme_are_among_them():
    shown = re.findall(r"\*\*(\d+\.\d+)\*\*", section("README.md", "Measured"))
    assert len(shown) == 7
    assert set(shown) <= set(re.findall(r"\d+\.\d+", " ".join(measured())))
