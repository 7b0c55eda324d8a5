"""Mutual exclusion of sampling and weight syncs where a sync may interrupt generation (rollout.partial)."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.controller.base import RankSilentError


class SyncGate:
    """Lets new weights in between two calls of the engines, and interrupts a call for them."""

    def __init__(self, interrupt: Callable[[], Any], *, timeout_seconds: float) -> None:
        """
        Args:
            interrupt: makes the engines return what they have so far; called from the thread that brings weights.
            timeout_seconds: how long the engines may take to return.
        """
        self._interrupt = interrupt
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._is_sampling = self._are_weights_due = False

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Inside, no new weights come. Waits for: new weights that are due. Unblocked by: the end of `weights`, whose
        sync and whose wait for this call have deadlines."""
        with self._changed:
            self._changed.wait_for(lambda: not self._are_weights_due)
            self._is_sampling = True
        try:
            yield
        finally:
            with self._changed:
                self._is_sampling = False
                self._changed.notify_all()

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Inside, nothing is sampled. Waits for: the engines' current call, which is interrupted. Unblocked by: the end
        of the call, the deadline.

        Raises:
            RankSilentError: the call did not end in time.
        """
        with self._changed:
            self._are_weights_due, is_sampling = True, self._is_sampling
        try:
            if is_sampling:
                self._interrupt()
            with self._changed:
                if not self._changed.wait_for(lambda: not self._is_sampling, self._timeout_seconds):
                    raise RankSilentError(
                        f"the rollout engines did not return from `generate` within {self._timeout_seconds:g} s after "
                        "new weights had interrupted it (rollout.placement.timeout_seconds)"
                    )
            yield
        finally:
            with self._changed:
                self._are_weights_due = False
                self._changed.notify_all()
