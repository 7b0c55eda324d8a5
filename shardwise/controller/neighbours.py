"""How ranks that our launcher does not watch notice at once that another one was killed: each waits for the farewell
of the next rank, and if that was killed, its connection closes instead."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.controller.failures import Failure
from shardwise.controller.process_group import Rank, another_connection
from shardwise.controller.roll_call import RollCall
from shardwise.types import Connections

_FAREWELL_TAG = 2
"""The same connections carry commands with tag 0 and shards for a checkpoint with tag 1."""
_AS_LONG_AS_IT_LIVES = timedelta(days=30)


@contextmanager
def watching_neighbour(rank: Rank, links: Connections, store: dist.Store, *, timeout_seconds: float) -> Iterator[None]:
    """Inside, a thread of this rank reports to rank 0 that the next rank (after the last, the first) is lost when its
    connection closes. If several ranks die together, the one before them reports it; so each rank needs one thread,
    and rank 0 none for every other rank. At the end, unless this rank has failed, it waits for the next one to be done
    too: an interpreter that ends while a thread is in gloo may abort.

    Waits for: the next rank's farewell, at the end. Unblocked by: that, the end of its process, or `timeout_seconds`,
    when this process ends with an error that names it.

    Args:
        links: connections of all ranks, on which nothing else uses _FAREWELL_TAG.
        store: the store that all ranks share.
    """
    after, before = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size

    def wait() -> None:
        try:
            links.recv([torch.empty(1, dtype=torch.uint8)], after, _FAREWELL_TAG).wait(_AS_LONG_AS_IT_LIVES)
        except RuntimeError:
            with suppress(RuntimeError):  # the store is gone too
                RollCall(another_connection(store), rank.rank, rank.world_size).report_loss()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    yield
    with suppress(RuntimeError):  # the store or the rank before is gone
        if RollCall(store, rank.rank, rank.world_size).has_left():
            return
        links.send([torch.zeros(1, dtype=torch.uint8)], before, _FAREWELL_TAG).wait()
    waiting.join(timeout_seconds)
    if waiting.is_alive():
        Failure(
            f"rank {rank.rank} is done, and rank {after} has not been for {timeout_seconds:.0f} s "
            "(engine.collective_timeout_seconds): it hangs; what was saved is whole"
        ).end_process()
