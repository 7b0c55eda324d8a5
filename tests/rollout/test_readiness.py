import weakref

import pytest
import torch

from shardwise.config import TrainingError
from shardwise.rollout.readiness import Readiness

WEIGHTS = {"a": torch.ones(1), "b": torch.ones(2)}


def load(readiness, names):
    missing = dict(WEIGHTS)
    assert [name for name, _ in readiness.arriving(((name, WEIGHTS[name]) for name in names), missing)] == list(names)
    return missing


def test_nothing_is_generated_from_the_first_tensor_to_the_commit():
    readiness = Readiness("the engine", sleep_level=0)
    readiness.require()
    missing = load(readiness, "ab")
    with pytest.raises(RuntimeError, match="the engine cannot generate: the last weight sync broke off"):
        readiness.require()
    with pytest.raises(RuntimeError, match="version 3 cannot be committed to the engine: the last weight sync broke"):
        readiness.commit(3)
    readiness.arrived(missing)
    with pytest.raises(RuntimeError, match="weights have arrived that are not committed"):
        readiness.require()
    assert not readiness.is_ready
    readiness.commit(3)
    readiness.require()
    assert readiness.is_ready
    assert readiness.version == 3


def test_a_tensor_that_was_taken_is_not_kept_while_the_next_one_is_made():
    kept = []

    def made():
        for name in "ab":
            tensor = torch.ones(1)
            alive = weakref.ref(tensor)
            yield name, tensor
            del tensor
            kept.append(alive() is not None)

    for _, tensor in Readiness("the engine", sleep_level=0).arriving(made(), dict(WEIGHTS)):
        del tensor
    assert kept == [False, False]


def test_a_sync_that_was_not_whole_is_not_committed_and_the_next_whole_one_is():
    readiness = Readiness("the engine", sleep_level=0)
    readiness.arrived(load(readiness, "a"))
    for act in (readiness.require, lambda: readiness.commit(1)):
        with pytest.raises(RuntimeError, match="the last weight sync did not bring b"):
            act()
    readiness.arrived(load(readiness, "ab"))
    readiness.commit(2)
    readiness.require()


def test_a_sync_that_has_begun_is_committed_only_where_it_has_ended():
    readiness = Readiness("the engine", sleep_level=0)
    readiness.begin_sync()
    assert not readiness.is_ready
    with pytest.raises(
        RuntimeError, match="version 1 cannot be committed to the engine: the last weight sync broke off"
    ):
        readiness.commit(1)
    readiness.arrived()
    assert not readiness.is_ready
    readiness.commit(1)
    assert (readiness.is_ready, readiness.version) == (True, 1)


def test_nothing_that_came_changes_nothing():
    readiness = Readiness("the engine", sleep_level=0)
    assert load(readiness, "") == WEIGHTS
    readiness.require()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_parts_sleep_once_and_wake_one_by_one(level):
    readiness, calls = Readiness("the engine", sleep_level=level), []
    for _ in range(2):
        readiness.sleep(lambda: calls.append("sleep"))
    readiness.wake(["weights"], calls.append)
    for _ in range(2):
        readiness.wake(["weights", "kv_cache"], calls.append)
    assert calls == ([] if level == 0 else ["sleep", ["weights"], ["kv_cache"]])
    assert readiness.lacks_weights == (level == 2)
    if level == 2:
        with pytest.raises(TrainingError, match="sleep_level=2 dropped the weights, and no weight sync came since"):
            readiness.require()
        readiness.arrived(load(readiness, "ab"))
        readiness.commit(1)
    readiness.require()
    assert not readiness.lacks_weights
