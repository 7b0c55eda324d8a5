"""The contract between a recipe and the processes that run its workers."""

from collections.abc import Sequence
from typing import Any, Protocol


class RankSilentError(RuntimeError):
    """Another rank did not do its part in time."""


class RankStalledError(RuntimeError):
    """A rank makes no progress, such as rank 0, for which the others wait without a deadline."""


class WorkerGroup(Protocol):
    """Calls methods of a worker object that lives on every rank. Knows no machine learning."""

    size: int
    """Number of ranks in the group."""
    ranks: Sequence[int]
    """The members, as ranks of the job."""

    @property
    def background(self) -> "WorkerGroup | None":
        """A second group of the same ranks with workers of its own, whose calls run alongside those of this group; None
        if there is none."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls `worker.method(*args)` on every rank; returns the results by rank."""

    def scatter(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        """Calls `worker.method(shard, *args)` on every rank; returns one result for each shard.

        With fewer shards than ranks, each run of `size / len(shards)` neighboring ranks gets the same shard and works
        on it together; the first of them gives the result.
        """

    def part(self, first: int, last: int, *, timeout_seconds: float, timeout_key: str) -> "WorkerGroup":
        """Returns the members from `first` up to, not including, `last` as a group with its own deadline for answers,
        which the config key `timeout_key` sets. Calls of its `background` keep their deadline."""

    def shutdown(self) -> None:
        """Ends the serving loop of every other rank."""
