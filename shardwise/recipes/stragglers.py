"""Which rank is slower than the others."""

import re
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from shardwise.types import Metrics

_BUSY = re.compile(r"(?P<model>\w+)/busy/(?P<phase>\w+)/rank_(?P<rank>\d+)")
"""The metrics of `BusyClock`."""
SLOW = 2.0
"""So many times as long as the others is worth a word."""


def without_busy(metrics: Metrics) -> tuple[Metrics, dict[str, dict[int, float]]]:
    """The metrics that the same seed gives again, and by model and phase the seconds that every rank computed."""
    busy: defaultdict[str, dict[int, float]] = defaultdict(dict)
    rest: Metrics = {}
    for name, value in metrics.items():
        match = _BUSY.fullmatch(name)
        if match is None:
            rest[name] = value
        else:
            busy[f"{match['model']}/{match['phase']}"][int(match["rank"])] = value.result()
    return rest, busy


def stragglers(busy: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """For each phase with several ranks `PHASE_slowest_rank`, and `PHASE_imbalance`: how many times as long as the
    others on average it computed."""
    found: dict[str, float] = {}
    for phase, seconds in busy.items():
        if len(seconds) < 2:
            continue
        slowest = max(seconds, key=seconds.__getitem__)
        others = fmean(value for rank, value in seconds.items() if rank != slowest)
        found[f"{phase}_slowest_rank"] = float(slowest)
        found[f"{phase}_imbalance"] = seconds[slowest] / others if others else 1.0
    return found


def slow_rank(found: Mapping[str, float]) -> dict[str, float]:
    """For the line of a step: the rank that is `SLOW` times as slow as the others in some phase, if there is one."""
    phases = [name.removesuffix("_imbalance") for name in found if name.endswith("_imbalance")]
    worst = max(phases, key=lambda phase: found[f"{phase}_imbalance"], default=None)
    if worst is None or found[f"{worst}_imbalance"] < SLOW:
        return {}
    return {"slow rank": found[f"{worst}_slowest_rank"], "times": found[f"{worst}_imbalance"]}
