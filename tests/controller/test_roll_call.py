import socket
import threading
import time

import pytest
import torch.distributed as dist

from shardwise.config import ConfigError
from shardwise.controller import roll_call
from shardwise.controller.failures import Note
from shardwise.controller.roll_call import RollCall
from shardwise.controller.watchdog import JOB_FOLDER_VARIABLE, be_watched, commanded

HOST = socket.gethostname()
LOST = RuntimeError("[gloo] Connection closed by peer [10.0.0.2]:3421")


@pytest.fixture
def roll():
    """Of four ranks that share a store, by rank."""
    store = dist.HashStore()
    ranks = [RollCall(store, rank, 4) for rank in range(4)]
    for rank in ranks:
        rank.enter()
    return ranks


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(roll_call, "_SECONDS_BETWEEN_LOOKS", 0.01)


@pytest.fixture(autouse=True)
def _outside_of_steps(monkeypatch):
    """Whatever tests before these have begun."""
    monkeypatch.delenv(JOB_FOLDER_VARIABLE, raising=False)
    be_watched(0)


def answering(*ranks):
    """They look again and again until the test ends."""

    def look():
        while not over.wait(0.01):
            for rank in ranks:
                rank.answer()

    over = threading.Event()
    threading.Thread(target=look, daemon=True).start()
    return over


def test_a_rank_that_neither_answers_nor_left_word_is_gone(roll):
    roll[1].leave(Note.of(LOST, 1))  # it ended because another one had
    over = answering(roll[3])
    failure = roll[0].why_one_is_lost(seconds=0.5)
    over.set()
    assert failure.code == 1
    assert failure.message == (
        f"rank 2 on {HOST} is gone and left no word: its process was killed or stopped, or the host or the network to "
        "it is down; torchrun on that host tells the exit signal, and the same command goes on from the last checkpoint"
    )


def test_a_rank_that_fails_for_a_reason_of_its_own_is_named_at_once(roll):
    began = time.monotonic()
    roll[1].leave(Note.of(LOST, 1))
    roll[2].leave(Note.of(ValueError("this pack has no tokens"), 2))
    failure = roll[0].why_one_is_lost(seconds=30)
    assert (failure.message, failure.code) == (f"rank 2 on {HOST} failed: this pack has no tokens", 1)
    roll[1].leave(Note.of(ConfigError("use 1, 2 or 4"), 1))
    failure = roll[0].why_one_is_lost(seconds=30)
    assert (failure.message, failure.code) == (f"rank 1 on {HOST} failed: use 1, 2 or 4", 2)
    assert time.monotonic() - began < 5


def test_those_at_work_that_have_not_given_up_hang(roll):
    with commanded("train", ["policy"]):
        for rank in roll[1:]:
            rank.answer()
    roll[1].leave(Note.of(LOST, 1))
    assert roll[0].hanging() == f"rank 2 on {HOST} hangs in `train policy`, rank 3 on {HOST} hangs in `train policy`"
    roll[2].answer()  # it waits to be told what to do
    roll[3].finish()
    assert roll[0].hanging() == ""


def test_a_rank_that_is_ended_for_hanging_is_told_so_to_other_hosts(roll):
    roll[2].report_hanging(3, "step 3, `train policy`")
    failure = roll[0].why_one_is_lost(seconds=30)
    assert (failure.message, failure.code) == (f"rank 3 on {HOST} failed: it hangs in step 3, `train policy`", 1)


def test_a_rank_whose_work_is_done_is_not_taken_for_gone(roll):
    roll[1].finish()
    over = answering(roll[3])
    failure = roll[0].why_one_is_lost(seconds=0.5)
    over.set()
    assert failure.message.startswith(f"rank 2 on {HOST} is gone and left no word")


def test_nobody_is_named_where_all_live(roll):
    """A connection broke between two of them."""
    over = answering(*roll[1:])
    began = time.monotonic()
    assert roll[0].why_one_is_lost(seconds=30) is None
    over.set()
    assert time.monotonic() - began < 5


def test_of_many_ranks_that_are_gone_the_first_are_named():
    failure = RollCall(dist.HashStore(), 0, 12).why_one_is_lost(seconds=0)
    assert failure.message.startswith(
        "rank 1, rank 2, rank 3, rank 4, rank 5, rank 6, rank 7, rank 8 and 3 more are gone and left no word: their "
        "processes were killed or stopped, "
    )


def test_without_the_store_nobody_is_named():
    class Gone:
        def set(self, *_):
            raise RuntimeError("Connection reset by peer")

        check = multi_get = set

    RollCall(Gone(), 1, 2).leave(Note.of(LOST, 1))
    assert RollCall(Gone(), 0, 2).why_one_is_lost(seconds=30) is None
