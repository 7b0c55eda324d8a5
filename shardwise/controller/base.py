"""The contract between a recipe and the processes that run its workers."""

from collections.abc import Sequence
from typing import Any, Protocol


class RankSilentError(RuntimeError):
    """Another rank did not do its part in time."""


class RankStalledError(RuntimeError):
    """A rank, such as rank 0, which the others wait for as long as it takes, does not go on."""


class WorkerGroup(Protocol):
    """Calls methods of a worker object that lives on every rank. Knows no machine learning."""

    size: int
    """Ranks in the group."""
    ranks: Sequence[int]
    """Which ranks of the job they are."""

    @property
    def background(self) -> "WorkerGroup | None":
        """Reaches the same ranks beside this group: its calls go on while those of this group do, to workers of their
        own. None where there are none."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls `worker.method(*args)` on every rank; returns the results by rank."""

    def scatter(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        """Calls `worker.method(shard, *args)` on every rank; returns one result for each shard.

        Where there are fewer shards than ranks, as many neighbouring ranks get the same one (they work on it together),
        and the first of them gives the result.
        """

    def part(self, first: int, last: int, *, timeout_seconds: float, timeout_key: str) -> "WorkerGroup":
        """The ranks from `first` to before `last`, as a group with a deadline of its own for answers, which the config
        key `timeout_key` sets. Calls beside it keep their deadline."""

    def shutdown(self) -> None:
        """Ends the serving loop of every other rank."""
