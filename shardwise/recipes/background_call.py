"""A call in a background thread."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """A call in a thread that does not keep the process alive: after an error elsewhere it may never return."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._results: list[T] = []
        self._failure: BaseException | None = None
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def seconds(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._started

    def wait(self, within_seconds: float) -> bool:
        """Returns whether the call is done. Waits for: the call. Unblocked by: the deadline, from the call's start."""
        self._thread.join(max(0.0, within_seconds - self.seconds))
        return self.is_done

    def result(self) -> T:
        """Returns the call's result, or raises what it raised. Waits for: the call. Unblocked by: the deadlines of what
        it calls."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:
            self._failure = error
