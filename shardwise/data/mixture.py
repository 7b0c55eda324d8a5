"""Picks the next prompts: sources mixed by weight, stage after stage; prompts of the wrong difficulty sit out."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from shardwise.config import ConfigError, PromptDataConfig
from shardwise.data.loader import RowOrder, RowRecord, compare_rows


class PromptStream:
    """An endless stream of rows from one or more sources, each of which runs through its own epochs.

    Deterministic: the same calls give the same rows.

    Example: sources ["a", "b", "b"] with weights {"a": 1, "b": 3}, 4 rows at a time: one from a, three from b
    """

    def __init__(
        self,
        sources: Sequence[str],
        config: PromptDataConfig,
        *,
        seed: int,
        digest: str | None = None,
        rows_may_differ: bool = False,
    ) -> None:
        """Starts before the first row.

        Args:
            sources: the data source of every row.
            digest: of the tokens of the rows.
            rows_may_differ: whether the rows may differ from those of the run that is resumed.
        Raises:
            ConfigError: data.mixture names a source that no row has.
        """
        self.rows_may_differ = rows_may_differ
        self._digest = digest
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
        self._rows: dict[str, list[int]] = {name: [] for name in names}
        for row, source in enumerate(sources):
            self._rows[source if config.mixture else ""].append(row)
        self._orders = {
            name: RowOrder(num_rows=len(rows), seed=seed, shuffle=config.shuffle) for name, rows in self._rows.items()
        }
        self._stage = -1
        self._taken: Counter[str] = Counter()
        self.position = dict.fromkeys(names, 0)
        self.pass_rates: dict[int, float] = {}
        """Row -> share of its completions that were correct; forgotten once the row has sat out because of it."""

    def take(self, num_rows: int, *, step: int) -> list[int]:
        """Returns the next rows, for a step of the run (counted from 1)."""
        return [self._next(self._source(step)) for _ in range(num_rows)]

    def record(self, row: int, pass_rate: float) -> None:
        """Remembers the share of a row's completions that were correct."""
        if self._difficulty is not None:
            self.pass_rates[row] = pass_rate

    def state_dict(self) -> dict[str, Any]:
        """Returns all that decides on the next rows, JSON-serializable."""
        return {
            "num_rows": {name: len(rows) for name, rows in self._rows.items()},
            "digest": self._digest,
            "position": dict(self.position),
            "pass_rates": {str(row): rate for row, rate in self.pass_rates.items()},
            "stage": self._stage,
            "taken": dict(self._taken),
        }

    def load_state_dict(self, state: dict[str, Any], *, are_others: bool = False) -> None:
        """Continues where the saved stream was. If the rows are others, it skips as many of each source as that stream
        had taken, and starts without pass rates.

        Args:
            are_others: whether the rows differ from the saved stream's, even if there are as many.
        Raises:
            DataError: the saved stream had more or fewer rows, and they may not differ.
        """
        num_rows = {name: len(rows) for name, rows in self._rows.items()}
        before, now = (counts.get("", counts) for counts in (state["num_rows"], num_rows))
        compare_rows(
            RowRecord(before, state.get("digest")), RowRecord(now, self._digest), may_differ=self.rows_may_differ
        )
        self.position |= {name: taken for name, taken in state["position"].items() if name in num_rows}
        if before == now and not are_others:
            self.pass_rates = {int(row): rate for row, rate in state["pass_rates"].items()}
            self._stage, self._taken = state["stage"], Counter(state["taken"])

    def _source(self, step: int) -> str:
        """Takes and returns the source that is furthest behind its share of this stage's rows."""
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
