"""How much memory ranks held, as the launcher saw it: reported when one runs out of memory."""

import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path

_SECONDS_BETWEEN = 1.0
_NUM_KEPT = 60


class MemoryHistory:
    """Resident bytes of every rank, once a second for the last minute."""

    def __init__(self) -> None:
        self._samples: defaultdict[int, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=_NUM_KEPT))
        self._next = 0.0

    def sample(self, pids: Mapping[int, int]) -> None:
        """Samples these processes, given by rank, if the last sample is a second old."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _SECONDS_BETWEEN
        for rank, pid in pids.items():
            num_bytes = _resident_bytes(pid)
            if num_bytes:  # 0: it has ended
                self._samples[rank].append((now, num_bytes))

    def told(self, rank: int, until: float = math.inf) -> str:
        """Returns text such as "it held 22.4 GiB, 30 s before 8.1 GiB, 59 s before 1.2 GiB"; "" if there are no
        samples.

        Args:
            until: as time.monotonic(): later samples are ignored, since a rank frees memory on its way out.
        """
        samples = [sample for sample in self._samples[rank] if sample[0] <= until]
        if not samples:
            return ""
        (last, held), earlier = samples[-1], dict.fromkeys([samples[len(samples) // 2], samples[0]])
        parts = [f"{last - when:.0f} s before {_shown(size)}" for when, size in earlier if when < last]
        return ", ".join([f"it held {_shown(held)}", *parts])


def _resident_bytes(pid: int) -> int:
    """Resident bytes of a process; 0 if it has ended, or on a system without /proc."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
