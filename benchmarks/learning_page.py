"""docs/results.md, made from the runs of the learning benchmark: a table and curves drawn in text."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

BARS = "▁▂▃▄▅▆▇█"
TITLES = {
    "rl": "Reinforcement learning: held-out greedy accuracy",
    "preference": "Preference training: held-out margin",
    "reward_model": "Reward model: held-out pairs told apart",
    "distill": "Distillation: divergence from the teacher",
}


def results_page(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown. `runs` is {variant: {seed: {"start", "curve": [(step, value)], "seconds", "met"}}}."""
    lines = [
        "# Results",
        "",
        "Made by `make test-learning`: the quickstart's model (0.8M parameters) and addition problems, two ranks on",
        "two CPU cores, every algorithm from the same supervised start. A curve is the held-out figure at every",
        "validation, scaled from 0 to the largest of its table. What runs change of the quickstart is in",
        "`benchmarks/learning.py`.",
        "",
    ]
    for kind, title in TITLES.items():
        chosen = {name: by_seed for name, by_seed in runs.items() if kind_of(name) == kind}
        if chosen:
            lines += [f"## {title}", "", *_table(chosen), ""]
    return "\n".join(lines)


def kind_of(name: str) -> str:
    """The table that a variant belongs to."""
    match name:
        case "dpo" | "kto":
            return "preference"
        case "reward_model" | "distill":
            return name
        case _:
            return "rl"


def _table(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    highest = max(value for by_seed in runs.values() for run in by_seed.values() for _, value in run["curve"])
    rows = [
        "| algorithm | start | end, by seed | median gain | target met | curve of the first seed |",
        "|---|---|---|---|---|---|",
    ]
    for name, by_seed in runs.items():
        seeds = [by_seed[seed] for seed in sorted(by_seed)]
        ends = [run["curve"][-1][1] for run in seeds]
        gain = statistics.median(end - run["start"] for end, run in zip(ends, seeds, strict=True))
        starts = " / ".join(f"{run['start']:.3f}" for run in seeds)
        met = f"{sum(run['met'] for run in seeds)} of {len(seeds)}"
        curve = sparkline([seeds[0]["start"], *(value for _, value in seeds[0]["curve"])], highest)
        rows.append(f"| `{name}` | {starts} | {' / '.join(f'{e:.3f}' for e in ends)} | {gain:+.3f} | {met} | {curve} |")
    return rows


def sparkline(values: Sequence[float], highest: float) -> str:
    """One bar for each value, from 0 to `highest`."""
    top = len(BARS) - 1
    return "".join(
        BARS[round(top * min(max(value / highest, 0.0), 1.0))] if highest > 0 else BARS[0] for value in values
    )
