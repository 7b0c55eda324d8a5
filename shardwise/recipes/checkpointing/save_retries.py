"""Handles checkpoints that cannot be saved: tries again, then ends the run or lets it continue."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwise.config import ExportError, NotFiniteError, TrainerConfig
from shardwise.console import warn

_PAUSE_SECONDS = 1.0
"""Pause before the first retry; doubled before each further one."""


class SaveRetries:
    """Tries a save again, then ends the run or lets it continue without the checkpoint."""

    def __init__(self, trainer: TrainerConfig) -> None:
        self._trainer = trainer
        self._failure: ExportError | NotFiniteError | None = None
        self.num_failures = 0
        """Checkpoints that could not be saved so far."""

    def retry(self, step: int, attempt: Callable[[], None]) -> None:
        """Calls `attempt`, a part of saving a step's checkpoint that leaves nothing when it fails, until it succeeds or
        trainer.save_retries are used up. A NotFiniteError is not tried again: the numbers stay as they are.

        Raises:
            ExportError, NotFiniteError: as the last attempt; names the step.
        """
        for number in range(self._trainer.save_retries + 1):
            try:
                attempt()
                return
            except (ExportError, NotFiniteError) as error:
                failure = type(error)(f"the checkpoint of step {step} was not saved: {error}")
                if number == self._trainer.save_retries or isinstance(error, NotFiniteError):
                    raise failure from None
                pause = _PAUSE_SECONDS * 2**number
                warn(f"{failure}. Trying again in {pause:.0f} s")
                time.sleep(pause)

    def note_saved(self) -> None:
        """Forgets the last failure, since a newer checkpoint is saved."""
        self._failure = None

    @contextmanager
    def tolerate(self) -> Iterator[None]:
        """Raises what its body raises, except a failed save with trainer.on_save_error=continue: that is reported and
        counted."""
        try:
            yield
        except (ExportError, NotFiniteError) as error:
            if self._trainer.on_save_error == "stop":
                raise
            self._failure = error
            self.num_failures += 1
            warn(f"{error}. Training continues (trainer.on_save_error=continue)")

    def require_last_saved(self) -> None:
        """Raises the failure of the last checkpoint, if it was not saved."""
        if self._failure is not None:
            raise type(self._failure)(f"all steps are done, but {self._failure}")
