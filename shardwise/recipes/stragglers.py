"""Finds the rank that is slower than the others."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from shardwise.types import Metrics

_BUSY = re.compile(r"(?P<model>\w+)/busy/(?P<phase>\w+)/rank_(?P<rank>\d+)")
"""Matches the metrics of `BusyClock`."""
SLOW = 2.0
WORTH_A_WORD = 0.1


def without_busy(metrics: Metrics) -> tuple[Metrics, dict[str, dict[int, float]]]:
    """Splits metrics into those that the same seed reproduces, and "MODEL/PHASE" -> rank -> computing seconds."""
    busy: defaultdict[str, dict[int, float]] = defaultdict(dict)
    rest: Metrics = {}
    for name, value in metrics.items():
        match = _BUSY.fullmatch(name)
        if match is None:
            rest[name] = value
        else:
            busy[f"{match['model']}/{match['phase']}"][int(match["rank"])] = value.result()
    return rest, busy


@dataclass(frozen=True, slots=True)
class Straggler:
    """The slowest rank of a phase."""

    phase: str
    rank: int
    seconds: float
    """Seconds for which it computed."""
    others_seconds: float
    """Mean of the other ranks."""

    @property
    def imbalance(self) -> float:
        """How many times as long as the others it computed."""
        return self.seconds / self.others_seconds if self.others_seconds else 1.0


def stragglers(busy: Mapping[str, Mapping[int, float]]) -> list[Straggler]:
    """Returns the slowest rank of every phase that several ranks had."""
    found = []
    for phase, seconds in busy.items():
        if len(seconds) > 1:
            rank = max(seconds, key=seconds.__getitem__)
            others = fmean(value for other, value in seconds.items() if other != rank)
            found.append(Straggler(phase, rank, seconds[rank], others))
    return found


def straggler_metrics(found: Iterable[Straggler]) -> dict[str, float]:
    """Returns `PHASE_slowest_rank` and `PHASE_imbalance` of every phase."""
    metrics: dict[str, float] = {}
    for one in found:
        metrics |= {f"{one.phase}_slowest_rank": one.rank, f"{one.phase}_imbalance": one.imbalance}
    return metrics


def slow_rank(found: Iterable[Straggler], *, step_seconds: float) -> dict[str, float]:
    """Returns the rank that holds up the others most, for the line of a step, if any is `SLOW` times as slow as they
    are and costs them `WORTH_A_WORD` of the step."""
    slow = [
        one
        for one in found
        if one.imbalance >= SLOW and one.seconds - one.others_seconds >= WORTH_A_WORD * step_seconds
    ]
    if not slow:
        return {}
    worst = max(slow, key=lambda one: one.seconds - one.others_seconds)
    return {f"rank {worst.rank} slower by a factor of": worst.imbalance}
