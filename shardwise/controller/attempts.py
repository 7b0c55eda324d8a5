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
"""Key of the number of attempts so far; rank 0 of each adds one."""
_RESTARTS, _PRESENT = "restarts", "present"
"""Keys in the store of one attempt: restarts so far, and the words of the ranks that are in it."""
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 0.5


def join_attempt(rank: int, world_size: int, store: dist.Store, *, timeout_seconds: float) -> dist.Store:
    """Returns the part of a store that belongs to the newest attempt alone, once all ranks are in it.

    Rank 0 numbers the attempt, and the others answer, each with a random word of its own process. A rank goes on with
    an attempt once it is complete and has that word: an earlier attempt was completed with another word.

    Waits for: every other rank. Unblocked by: the timeout.
    Raises:
        RuntimeError: a rank did not come; names those that are missing.
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
    answered = newest > 0 and not attempt.check([_PRESENT])  # else the newest rank 0 is a past one
    raise _absent([other for other in others if answered and not attempt.check([_answer_of(other)])] or [0])


def restarts_done(store: dist.Store) -> int:
    """Returns how often torchrun has restarted the ranks of this store; the same number on all of them."""
    return int(store.get(_RESTARTS)) if store.check([_RESTARTS]) else torchrun_restarts_done()  # rank 0 of 1


def _store_of(attempt: int, store: dist.Store) -> dist.Store:
    return dist.PrefixStore(f"attempt_{attempt}", store)


def _answer_of(rank: int) -> str:
    return f"answer/{rank}"


def _wait(is_over: Callable[[], bool], timeout_seconds: float) -> bool:
    """Returns whether it was over in time. Asks the store less and less often, for thousands of ranks may ask it."""
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
