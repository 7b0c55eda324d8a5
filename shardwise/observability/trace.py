"""Measures where the seconds of a step went."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Spans:
    """Adds up wall seconds by name.

    Example:
        spans = Spans()
        with spans("rollout"):
            ...
        spans.take()    # {"seconds/rollout": 1.2}
    """

    def __init__(self, enter: Callable[[str], None] = lambda name: None) -> None:
        """
        Args:
            enter: called with the name of the span that begins, and at its end with that of the one around it, or "".
        """
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._enter = enter
        self._name = ""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times the body of a `with`, even if it raises. Spans may nest; the outer one includes the inner one."""
        outer, start = self._name, time.perf_counter()
        self._change(name)
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)
            self._change(outer)

    @property
    def current(self) -> str:
        """The name of the innermost span under way; "" where there is none."""
        return self._name

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds that were measured elsewhere."""
        self._seconds[name] += seconds

    def take(self) -> dict[str, float]:
        """Returns the seconds since the last `take`, as {"seconds/<name>": seconds}, and starts from zero."""
        taken = {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken

    def _change(self, name: str) -> None:
        self._name = name
        self._enter(name)
