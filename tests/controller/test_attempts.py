import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from shardwise.controller.attempts import join_attempt, restarts_done


@pytest.fixture
def agent():
    """A store that outlives attempts."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join(rank, world_size, agent, *, seconds=20.0):
    """As a process of its own would."""
    client = dist.TCPStore("127.0.0.1", agent.port, is_master=False)
    return join_attempt(rank, world_size, client, timeout_seconds=seconds)


def attempt(agent, world_size, *, order=None):
    """The stores of ranks that start one after the other, in this order."""
    with ThreadPoolExecutor(world_size) as pool:
        begun = {}
        for rank in range(world_size) if order is None else order:
            begun[rank] = pool.submit(join, rank, world_size, agent)
            time.sleep(0.1)
        return [begun[rank].result(20) for rank in range(world_size)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_ranks_share_a_store_that_holds_nothing_of_attempts_before(agent, order):
    for number in range(3):
        stores = attempt(agent, 3, order=order)
        assert not any(store.check(["left"]) for store in stores)
        stores[1].set("left", str(number))
        assert [store.get("left") for store in stores] == [str(number).encode()] * 3


def test_restarts_are_counted_alike_whatever_the_agents_count(agent, monkeypatch):
    """An agent that restarts because another one did does not count that."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "7")
    assert [[restarts_done(store) for store in attempt(agent, 2)] for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]
    assert restarts_done(dist.HashStore()) == 7, "a rank alone has one agent"


def test_an_answer_to_a_rank_0_that_died_before_all_had_come_is_not_enough(agent):
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(join, 1, 3, agent)
        with pytest.raises(RuntimeError, match=r"^rank 2 did not come; "):
            join(0, 3, agent, seconds=0.2)
        late = pool.submit(join, 2, 3, agent)
        time.sleep(0.2)
        assert not waiting.done()
        assert not late.done()
        store = join(0, 3, agent)
        assert [restarts_done(one) for one in (store, waiting.result(20), late.result(20))] == [1, 1, 1]


def test_ranks_that_do_not_come_are_named(agent):
    def error_of(rank, world_size, seconds=0.5):
        with pytest.raises(RuntimeError) as caught:
            join(rank, world_size, agent, seconds=seconds)
        return str(caught.value)

    assert error_of(1, 2) == "rank 0 did not come; see what became of them"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(error_of, 0, 4, 1.0)
        assert error_of(1, 4, 0.5) == "ranks 2, 3 did not come; see what became of them"
        assert first.result(20) == "ranks 2, 3 did not come; see what became of them"


def test_after_a_complete_attempt_it_is_rank_0_that_is_missed(agent):
    attempt(agent, 2)
    with pytest.raises(RuntimeError, match=r"^rank 0 did not come; "):
        join(1, 2, agent, seconds=0.3)


def test_eight_ranks_meet_at_once(agent):
    barrier = threading.Barrier(8)

    def seconds_of(rank):
        barrier.wait()
        began = time.monotonic()
        join(rank, 8, agent)
        return time.monotonic() - began

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(seconds_of, range(8))) < 2, "about 0.02 on a machine with nothing else to do"
