"""What becomes of a run whose checkpoint cannot be saved."""

import sys
import time
from collections.abc import Callable

from shardwise.config import ExportError, NotFiniteError, TrainerConfig

_PAUSE_SECONDS = 1.0
"""Before the first retry; doubled before each of the next."""


class SavePolicy:
    """Tries a save again, then ends the run or lets it go on without the checkpoint."""

    def __init__(self, trainer: TrainerConfig) -> None:
        self._trainer = trainer
        self._failure: ExportError | NotFiniteError | None = None
        self.num_failures = 0
        """Checkpoints that could not be saved so far."""

    def save(self, attempt: Callable[[], None]) -> None:
        """Calls `attempt`, which saves a checkpoint or leaves nothing of it.

        Raises:
            ExportError, NotFiniteError: as the last attempt, where trainer.on_save_error=stop.
        """
        try:
            self._try(attempt)
            self._failure = None
        except (ExportError, NotFiniteError) as error:
            if self._trainer.on_save_error == "stop":
                raise
            self._failure = error
            self.num_failures += 1
            _warn(f"{error}. Training goes on without this checkpoint (trainer.on_save_error=continue)")

    def require_last_saved(self) -> None:
        """Raises what kept the last checkpoint from being saved."""
        if self._failure is not None:
            reason = f"all steps are done, but their last checkpoint could not be saved: {self._failure}"
            raise type(self._failure)(reason)

    def _try(self, attempt: Callable[[], None]) -> None:
        for number in range(self._trainer.save_retries):
            try:
                return attempt()
            except ExportError as error:
                pause = _PAUSE_SECONDS * 2**number
                _warn(f"{error}. Trying again in {pause:.0f} s")
                time.sleep(pause)
        return attempt()


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
