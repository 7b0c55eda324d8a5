"""Notices that rank 0, which leads and for which the others wait without a deadline, makes no progress.

Our launcher does this, which also notices a stopped process; without it, a thread of rank 0 itself.
"""

import faulthandler
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shardwise.controller.base import RankStalledError
from shardwise.controller.watchdog import Activity, own_activity, write_reports

_LONGEST_NAP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StallLimit:
    """How long rank 0 may go without progress."""

    seconds: float
    key: str
    """The config key that sets it."""

    @classmethod
    def of(cls, key: str, seconds: float | None) -> Self | None:
        """Makes the limit from a config value; None: no limit."""
        return None if seconds is None else cls(seconds, key)

    def error(self, activity: Activity) -> RankStalledError | None:
        """Returns the error if rank 0 has made no progress for too long, else None. A wait with a deadline of its own
        counts only from that deadline on: a process that is stopped does not keep it."""
        if activity.seconds <= self.seconds + activity.deadline_seconds:
            return None
        return RankStalledError(
            f"rank 0 has not gone on for {activity.seconds:.0f} s ({self.key}={self.seconds:g}); if it is only slow, "
            "raise that"
        )


@contextmanager
def watching_itself(limit: StallLimit | None, end: Callable[[RankStalledError], None]) -> Iterator[None]:
    """Inside, a thread calls `end` if this rank makes no progress for longer than the limit."""
    if limit is None:
        yield
        return
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(min(limit.seconds / 4, _LONGEST_NAP_SECONDS)):
            if (error := limit.error(own_activity())) is not None:
                end(error)
                return

    thread = threading.Thread(target=watch, name="stalls", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_LONGEST_NAP_SECONDS)


def with_own_stacks(error: RankStalledError, reports: Path | None) -> RankStalledError:
    """Returns the error extended by where this process hangs and where its stacks were written; for a job of one
    process, which no other one can ask."""
    told = f"rank 0 hangs in {own_activity().place or 'its start'}: {error}"
    if reports is None:
        return RankStalledError(told)
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        stacks = file.read().decode()
    try:
        return RankStalledError(f"{told}; its stacks: {write_reports(reports, {0: stacks})}")
    except OSError as failure:
        return RankStalledError(f"{told}; its stacks could not be written to {reports}: {failure}")
