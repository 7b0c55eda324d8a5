"""Where the seconds of a step went."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Spans:
    """Adds up wall seconds by name.

    Example:
        spans = Spans()
        with spans("rollout"):
            ...
        spans.take()    # {"seconds/rollout": 1.2}
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times its body, which counts also when it raises. Spans may nest; the outer one includes the inner one."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Counts seconds that were measured elsewhere."""
        self._seconds[name] += seconds

    def take(self) -> dict[str, float]:
        """Seconds since the last `take`, as {"seconds/<name>": seconds}, and starts from zero."""
        taken = {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken
