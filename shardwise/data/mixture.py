"""Which prompts come next: sources mixed by weight, stage after stage, and prompts of the wrong difficulty left out."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from shardwise.config import ConfigError, PromptDataConfig
from shardwise.data.loader import RowOrder, compare_rows


class PromptStream:
    """An endless stream of rows, drawn source by source, each source in its own order of epochs.

    Deterministic: the same calls give the same rows.

    Example: sources ["a", "b", "b"] with weights {"a": 1, "b": 3}, 4 rows at a time: one of a, three of b
    """

    def __init__(
        self, sources: Sequence[str], config: PromptDataConfig, *, seed: int, rows_may_differ: bool = False
    ) -> None:
        """Starts before the first row.

        Args:
            sources: the data source of every row.
            rows_may_differ: from those of the run that is resumed.
        Raises:
            ConfigError: data.mixture names a source that no row has.
        """
        self.rows_may_differ = rows_may_differ
        self._mixture = config.mixture
        self._difficulty = config.difficulty
        names = sorted(set(sources)) if config.mixture else [""]
        for number, stage in enumerate(config.mixture):
            unknown = sorted(set(stage.weights) - set(names))
            if unknown:
                raise ConfigError(
                    f"data.mixture.{number}.weights names {', '.join(unknown)}, but the sources of the training rows "
                    f"are {', '.join(names)}"
                )
        self._rows = {
            name: [row for row, source in enumerate(sources) if not config.mixture or source == name] for name in names
        }
        self._orders = {
            name: RowOrder(num_rows=len(rows), seed=seed, shuffle=config.shuffle) for name, rows in self._rows.items()
        }
        self._stage = -1
        self._taken: Counter[str] = Counter()
        self.position = dict.fromkeys(names, 0)
        self.pass_rates: dict[int, float] = {}
        """Of rows that were asked, the share of correct completions; forgotten when a row sits out for it."""

    def take(self, num_rows: int, *, step: int) -> list[int]:
        """The next rows, for a step of the run (from 1)."""
        return [self._next(self._source(step)) for _ in range(num_rows)]

    def record(self, row: int, pass_rate: float) -> None:
        """Remembers the share of a row's completions that were correct."""
        if self._difficulty is not None:
            self.pass_rates[row] = pass_rate

    def state_dict(self) -> dict[str, Any]:
        """What decides on the next rows, JSON-serialisable."""
        return {
            "num_rows": {name: len(rows) for name, rows in self._rows.items()},
            "position": dict(self.position),
            "pass_rates": {str(row): rate for row, rate in self.pass_rates.items()},
            "stage": self._stage,
            "taken": dict(self._taken),
        }

    def load_state_dict(self, state: dict[str, Any], *, are_others: bool = False) -> None:
        """Goes on where the stream that gave the state was. In other rows, behind as many of each source as that one
        has taken, knowing of none how difficult it is.

        Args:
            are_others: the rows, though they may be as many.
        Raises:
            DataError: that stream had other rows, which may not be.
        """
        num_rows = {name: len(rows) for name, rows in self._rows.items()}
        before, now = (counts.get("", counts) for counts in (state["num_rows"], num_rows))
        compare_rows(before, now, may_differ=self.rows_may_differ)
        self.position |= {name: taken for name, taken in state["position"].items() if name in num_rows}
        if before == now and not are_others:
            self.pass_rates = {int(row): rate for row, rate in state["pass_rates"].items()}
            self._stage, self._taken = state["stage"], Counter(state["taken"])

    def _source(self, step: int) -> str:
        """The source that is furthest behind its share of this stage's rows."""
        if not self._mixture:
            return ""
        stage = max(number for number, stage in enumerate(self._mixture) if stage.from_step <= step)
        if stage != self._stage:
            self._stage = stage
            self._taken.clear()
        weights = self._mixture[stage].weights
        total, num_taken = sum(weights.values()), self._taken.total() + 1
        behind = {name: weight / total * num_taken - self._taken[name] for name, weight in weights.items() if weight}
        chosen = max(sorted(behind), key=behind.__getitem__)
        self._taken[chosen] += 1
        return chosen

    def _next(self, source: str) -> int:
        while True:
            row = self._rows[source][self._orders[source].row(self.position[source])]
            self.position[source] += 1
            if not self._sits_out(row):
                return row

    def _sits_out(self, row: int) -> bool:
        if self._difficulty is None or row not in self.pass_rates:
            return False
        inside = self._difficulty.min_pass_rate <= self.pass_rates[row] <= self._difficulty.max_pass_rate
        if not inside:
            del self.pass_rates[row]  # asked again in the next epoch: the policy changes
        return not inside
