"""Restarts a job after a failure, as often as it is allowed to and only while that helps."""

import os
from collections.abc import Callable, Sequence

from shardwise.console import counted, tell
from shardwise.controller.failures import Failure

Mark = tuple[str, int]
"""A checkpoint: its path, and a number that tells it from another one at the same path."""
_MOST_IN_VAIN = 2
"""Most restarts in a row that end where the attempt before ended."""


def torchrun_restarts_allowed() -> int:
    """Returns how often torchrun may restart this rank; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def torchrun_restarts_done() -> int:
    """Returns how often torchrun has restarted this rank; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Restarts:
    """Decides after every failure of a job whether it restarts, and prints the decision."""

    def __init__(
        self,
        num_allowed: int,
        *,
        command: Sequence[str],
        resuming_command: Sequence[str],
        newest_checkpoint: Callable[[], Mark | None],
    ) -> None:
        """
        Args:
            command: starts the job as before.
            resuming_command: resumes it from the newest checkpoint, once it has saved one.
            newest_checkpoint: returns the newest checkpoint, if there is one.
        """
        self._num_allowed = num_allowed
        self._command = command
        self._resuming_command = resuming_command
        self._newest_checkpoint = newest_checkpoint
        self._at_start = newest_checkpoint()
        self._failures: list[Failure] = []
        self._ends: list[tuple[Mark | None, int | None]] = []

    def after(self, failure: Failure, step: int | None) -> Sequence[str] | None:
        """Returns the command to restart the ranks with; None if the job is over.

        Args:
            step: the step that the job was in; None before its first.
        """
        failure.print()
        if not failure.may_pass or self._num_allowed == 0:
            return None
        newest = self._newest_checkpoint()
        self._failures.append(failure)
        self._ends.append((newest, step))
        num_done = len(self._failures) - 1
        if self._is_stuck:
            where = "before the first step" if step is None else f"in step {step} without a new checkpoint"
            self._give_up(f"gave up after {num_done} of {self._num_allowed} restarts, which all ended {where}")
            return None
        if num_done == self._num_allowed:
            self._give_up(f"gave up after {counted(num_done, 'restart')}")
            return None
        has_own = newest is not None and newest != self._at_start
        start = f"resumes from {newest[0]}" if newest is not None and has_own else "starts as before"
        tell(f"restart {num_done + 1} of {self._num_allowed}: {start}")
        return self._resuming_command if has_own else self._command

    @property
    def _is_stuck(self) -> bool:
        last = self._ends[-1 - _MOST_IN_VAIN :]
        return len(last) > _MOST_IN_VAIN and len(set(last)) == 1

    def _give_up(self, reason: str) -> None:
        history = "".join(f"\n  {number}. {failure.message}" for number, failure in enumerate(self._failures, 1))
        tell(f"error: {reason}; the failures were:{history}")
