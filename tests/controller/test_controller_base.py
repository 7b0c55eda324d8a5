"""The contract of every worker group. A new group adds itself to GROUPS."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shardwise.controller.base import WorkerGroup
from shardwise.controller.local import RankGroup
from shardwise.controller.process_group import Rank, process_group


class Recorder:
    def __init__(self) -> None:
        self.seen: list = []

    def note(self, *values):
        self.seen.append(values)
        return len(self.seen), sum(values)

    def fail(self):
        raise ArithmeticError("worker failed")


@contextmanager
def rank_group(worker: object) -> Iterator[WorkerGroup]:
    with process_group(Rank(0, 1, 0), device_type="cpu", timeout_seconds=5) as control:
        group = RankGroup(worker, control, timeout_seconds=20)
        yield group
        group.shutdown()


GROUPS: dict[str, Callable] = {"local": rank_group}


@pytest.mark.parametrize("name", list(GROUPS))
def test_results_come_by_rank_one_for_each(name):
    worker = Recorder()
    with GROUPS[name](worker) as group:
        assert [tuple(result) for result in group.call("note", 1, 2)] == [(1, 3)] * group.size
        shards = [10 * (rank + 1) for rank in range(group.size)]
        assert [tuple(r) for r in group.scatter("note", shards, 5)] == [(2, shard + 5) for shard in shards]
    assert worker.seen == [(1, 2), (10, 5)]


@pytest.mark.parametrize("name", list(GROUPS))
def test_an_error_of_a_worker_reaches_the_caller(name):
    with GROUPS[name](Recorder()) as group, pytest.raises(ArithmeticError, match="worker failed"):
        group.call("fail")
