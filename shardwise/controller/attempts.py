"""Ranks of several hosts agree on which attempt of the job they are.

torchrun's store outlives the attempts, with all that they left in it, and the agents of the hosts do not agree on how
often they restarted: one does because a rank of its own died, and the others because it did, which they do not count.
"""

import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from shardwise.controller.restarts import torchrun_restarts_done

_ATTEMPTS = "attempts"
"""How many there have been, counted by the rank 0 of each."""
_RESTARTS, _PRESENT = "restarts", "present"
"""In the store of one attempt."""
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 0.5


def join_attempt(rank: int, world_size: int, store: dist.Store, *, timeout_seconds: float) -> dist.Store:
    """The part of a store that belongs to the newest attempt alone, once all ranks are in it.

    Rank 0 numbers the attempt, and the others answer. An answer carries a word of this very process, and a rank goes on
    with an attempt that was complete with its word in it: one of the past was so with another one.

    Waits for: every other rank. Unblocked by: the timeout.
    Raises:
        RuntimeError: ranks that did not come.
    """
    others = range(1, world_size)
    if rank == 0:
        number = store.add(_ATTEMPTS, 1)
        own = _store_of(number, store)
        answers = [_answer_of(other) for other in others]
        if not _wait(lambda: own.check(answers), timeout_seconds):
            raise _absent([other for other in others if not own.check([_answer_of(other)])])
        own.set(_RESTARTS, str(number - 1))
        own.set(_PRESENT, b" ".join(own.multi_get(answers)).decode())
        return own

    word, newest = uuid.uuid4().hex, 0

    def is_present() -> bool:
        nonlocal newest
        number = store.add(_ATTEMPTS, 0)
        if number == 0:
            return False
        attempt = _store_of(number, store)
        if number != newest:
            attempt.set(_answer_of(rank), word)
            newest = number
        return attempt.check([_PRESENT]) and word.encode() in attempt.get(_PRESENT).split()

    if _wait(is_present, timeout_seconds):
        return _store_of(newest, store)
    attempt = _store_of(newest, store)
    answered = newest > 0 and not attempt.check([_PRESENT])  # else rank 0 of the newest attempt is one of the past
    raise _absent([other for other in others if answered and not attempt.check([_answer_of(other)])] or [0])


def restarts_done(store: dist.Store) -> int:
    """How often torchrun has started the ranks of this store again: the same on all."""
    return int(store.get(_RESTARTS)) if store.check([_RESTARTS]) else torchrun_restarts_done()  # of one rank alone


def _store_of(attempt: int, store: dist.Store) -> dist.Store:
    return dist.PrefixStore(f"attempt_{attempt}", store)


def _answer_of(rank: int) -> str:
    return f"answer/{rank}"


def _wait(is_over: Callable[[], bool], timeout_seconds: float) -> bool:
    """Whether it was in time. Asks the store ever less often, for it may be asked by thousands."""
    began = time.monotonic()
    while not is_over():
        waited = time.monotonic() - began
        if waited > timeout_seconds:
            return False
        time.sleep(min(max(_SHORTEST_PAUSE_SECONDS, waited / 10), _LONGEST_PAUSE_SECONDS))
    return True


def _absent(ranks: list[int]) -> RuntimeError:
    numbers = ", ".join(map(str, ranks))
    return RuntimeError(f"rank{'s' if len(ranks) > 1 else ''} {numbers} did not come; see what became of them")
