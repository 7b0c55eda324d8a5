"""Stops a run between two steps, with a checkpoint, because a signal asks for it or the time is up."""

import os
import signal
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from shardwise.config import TrainerConfig
from shardwise.console import tell, warn
from shardwise.controller.exit_codes import TIME_IS_UP, code_of_signal
from shardwise.controller.launch import is_launched, seconds_since_start
from shardwise.controller.signals import SecondSignal, stop_signals
from shardwise.recipes.checkpointing.checkpoints import step_folders

_LOOK_SECONDS = 1.0


class Stopped(Exception):
    """A run has saved and stopped before its last step; the message says why, and how to continue."""

    def __init__(self, reason: str, outlook: str, code: int) -> None:
        super().__init__(f"{reason}; {outlook}")
        self.reason = reason
        self.code = code
        """The exit code of the job."""


class Stopping:
    """Knows when a run has to stop. A context manager: inside, SIGTERM, SIGINT and SIGHUP no longer end the process at
    once.

    From the first signal on, trainer.stop_grace_seconds are left for the step, the save, and leaving the context; then
    the process ends without more. A second signal ends it at once; under torchrun, one that is no copy of the first. A
    rank that `launch` started leaves second signals to `launch`, which may repeat one that went to all processes.
    """

    def __init__(self, trainer: TrainerConfig) -> None:
        self._trainer = trainer
        self._signal: signal.Signals | None = None
        self._second = SecondSignal()
        self._grace: threading.Timer | None = None
        self._longest_step_seconds = 0.0
        self._num_steps = 0
        self._is_warned = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._end_grace)
            stack.enter_context(stop_signals(self._react))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def count_step(self, seconds: float) -> None:
        """Takes the duration of a step. Warns once if a step other than the first, which may compile, exceeds the grace
        period."""
        self._longest_step_seconds = max(self._longest_step_seconds, seconds)
        self._num_steps += 1
        grace = self._trainer.stop_grace_seconds
        if self._num_steps > 1 and seconds > grace and not self._is_warned:
            self._is_warned = True
            warn(
                f"this step took {seconds:.0f} s, and trainer.stop_grace_seconds={grace:g} must be enough for one and "
                "a save: at a signal, what came after the last checkpoint may be lost. Set it as high as the time that "
                "your scheduler leaves before it kills allows, or save more often (trainer.save_every_steps)"
            )

    def is_due(self, *, save_seconds: float | None) -> bool:
        """Returns whether the run has to stop before its next step.

        Args:
            save_seconds: how long a save takes; None before the first: assumes that of the longest step.
        """
        return self._signal is not None or self._is_time_up(save_seconds)

    def stopped(self, step: int) -> Stopped:
        """Returns the exception to leave the recipe with, after `step` was saved."""
        trainer = self._trainer
        if self._signal is not None:
            reason, code = f"stopped by {self._signal.name}", code_of_signal(self._signal)
        else:
            reason, code = f"stopped for trainer.max_time_seconds={trainer.max_time_seconds:g}", TIME_IS_UP
        if not trainer.save_state:
            return Stopped(f"{reason} after step {step}", "not resumable, for trainer.save_state=false", code)
        return Stopped(reason, f"resumable: {_same_command(trainer)} continues after step {step}", code)

    def _is_time_up(self, save_seconds: float | None) -> bool:
        """Returns whether another step and a save might exceed trainer.max_time_seconds."""
        if self._trainer.max_time_seconds is None:
            return False
        needed = self._longest_step_seconds + (self._longest_step_seconds if save_seconds is None else save_seconds)
        return seconds_since_start() + needed > self._trainer.max_time_seconds

    def _react(self, number: int) -> None:
        """Reacts to a signal; called in the signals' thread."""
        is_second = self._second.has_come()
        if self._signal is None:
            self._signal = signal.Signals(number)
            grace = self._trainer.stop_grace_seconds
            late = f"trainer.stop_grace_seconds={grace:g} were too few for the step and the checkpoint; ended"
            self._grace = threading.Timer(grace, self._leave, [late])
            self._grace.daemon = True
            self._grace.start()
            tell(f"{self._signal.name}: saves and stops after this step")
        elif "RANK" not in os.environ or (is_second and not is_launched()):
            self._leave("ended at once")

    def _leave(self, reason: str) -> None:
        assert self._signal is not None
        tell(f"{self._signal.name}: {reason} {without_saving(self._trainer)}")
        sys.stderr.flush()
        os._exit(code_of_signal(self._signal))

    def _end_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()


def without_saving(trainer: TrainerConfig) -> str:
    """Says in words how a run ended that had no time to save, and what it resumes from."""
    if not trainer.save_state:
        return "without saving; not resumable, for trainer.save_state=false"
    run = Path(trainer.output_dir)
    folders = _checkpoints_at_once(run)
    if folders == []:
        return "without saving; there is no checkpoint yet, so the same command starts as before"
    place = f"the newest checkpoint in {run}" if folders is None else folders[0]
    return f"without saving; {_same_command(trainer)} resumes from {place}"


def _checkpoints_at_once(run: Path) -> list[Path] | None:
    """Returns the checkpoints, newest first; None if the file system does not answer at once, which may be why the run
    is late."""
    found: list[list[Path]] = []

    def look() -> None:
        with suppress(OSError):
            found.append(list(step_folders(run).values()))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(_LOOK_SECONDS)
    return found[0] if found else None


def _same_command(trainer: TrainerConfig) -> str:
    return "the same command" if trainer.resume == "auto" else "the same command with trainer.resume=auto"
