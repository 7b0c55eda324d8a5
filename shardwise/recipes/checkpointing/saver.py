"""Saves the checkpoints of a run: at once, or in the background while training continues."""

import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.config import TrainingConfig
from shardwise.controller.base import RankSilentError
from shardwise.controller.watchdog import commanded
from shardwise.observability import LogFile
from shardwise.recipes.background_call import BackgroundCall
from shardwise.recipes.checkpointing.checkpoints import step_folder
from shardwise.recipes.checkpointing.engine_files import EngineFiles, LiveEngines, StagedEngines
from shardwise.recipes.checkpointing.fingerprints import Fingerprints
from shardwise.recipes.checkpointing.manifest import write_manifest
from shardwise.recipes.checkpointing.publishing import new_checkpoint
from shardwise.recipes.checkpointing.resume import Beginning, write_run
from shardwise.recipes.checkpointing.retention import Reported, after_saving
from shardwise.recipes.checkpointing.save_checks import check_before_saving
from shardwise.recipes.checkpointing.save_retries import SaveRetries
from shardwise.recipes.engines import RemoteEngine


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint that this process has saved."""

    step: int
    folder: Path
    seconds: float
    """Duration of the save, from its beginning."""


@dataclass(frozen=True, slots=True)
class _Moment:
    """What a checkpoint holds beside engines, as of its step."""

    step: int
    parts: dict[str, Any]
    metrics: Mapping[str, float]
    logs: Sequence[LogFile]
    log_lengths: Mapping[str, int]
    """Name of a log -> its bytes up to this step."""


class Saver:
    """Saves checkpoints, one at a time. With trainer.async_save, every rank copies its shards to host memory while
    training continues, which waits for the copies before it changes the shards; checking, writing, hashing and
    publishing also run beside training.

    A save that fails is tried again, then raised, or with trainer.on_save_error=continue reported and counted.
    """

    def __init__(
        self,
        run: Path,
        config: TrainingConfig,
        engines: Mapping[str, RemoteEngine],
        reported: Reported,
        *,
        files: Fingerprints,
    ) -> None:
        """
        Args:
            run: the run's output folder.
            engines: the engines that checkpoints hold, by subfolder; that under "" is the run's main model.
            reported: the metrics of the run so far.
            files: fingerprints of the files that the run reads.
        """
        self._run = run
        self._config = config
        self._engines = engines
        self._reported = reported
        self._files = files
        self.begun_from: Beginning | None = None
        """Where the run in this folder began, if trainer.resume named it."""
        self._retries = SaveRetries(config.trainer)
        self._pending: BackgroundCall[None] | None = None
        self.newest: Published | None = None
        self._started = 0.0

    @property
    def num_failures(self) -> int:
        """Checkpoints that could not be saved so far."""
        return self._retries.num_failures

    def save(self, step: int, parts: Mapping[str, Any], logs: Sequence[LogFile] = ()) -> None:
        """Begins a save, or makes all of it; returns when the engines may train on.

        Args:
            parts: the state that each part of the recipe keeps between steps, by the part's name.
            logs: the run's logs up to this step; they are on disk before the checkpoint gets its name.
        Raises:
            ExportError, NotFiniteError: this save failed, or the one before it, in the background.
            ConfigError: as `after_saving`.
        """
        self.wait()
        self._started = time.perf_counter()
        lengths = {log.name: log.num_bytes for log in logs}
        moment = _Moment(step, dict(parts), self._reported.newest, logs, lengths)
        trainer = self._config.trainer
        writers = self._engines[""].group.background if trainer.async_save else None
        if writers is None:
            with self._retries.tolerate():
                self._publish(moment, LiveEngines(self._engines, with_state=trainer.save_state))
        else:
            staged = StagedEngines(self._engines, writers, with_state=trainer.save_state)
            moment = replace(moment, parts=deepcopy(moment.parts))
            self._pending = BackgroundCall(partial(self._publish, moment, staged))

    def check(self) -> None:
        """Raises what ended a save in the background, or RankSilentError if it is late."""
        pending, deadline = self._pending, self._config.trainer.save_timeout_seconds
        if pending is not None and (pending.is_done or pending.seconds > deadline):
            self.wait()

    def wait(self) -> None:
        """Waits for: the save in the background. Unblocked by: trainer.save_timeout_seconds. Raises as `check`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        deadline = self._config.trainer.save_timeout_seconds
        with self._retries.tolerate():
            with commanded("wait for the save", [], deadline_seconds=deadline):
                is_done = pending.wait(deadline)
            if not is_done:
                saved = self.newest
                kept = "none was saved since this start" if saved is None else f"the last one is {saved.folder}"
                raise RankSilentError(
                    f"a save in the background was not done within {deadline:g} s (trainer.save_timeout_seconds); the "
                    f"file system of {self._run} hangs or is slower than that; checkpoints that are whole stay: {kept}"
                )
            pending.result()

    def finish(self) -> None:
        """Waits as `wait` does, after the last save. Raises the failure of the last checkpoint, if it was not saved."""
        self.wait()
        self._retries.require_last_saved()

    def _publish(self, moment: _Moment, engine_files: EngineFiles) -> None:
        step = moment.step
        self._retries.retry(step, partial(self._write, moment, engine_files))
        self._retries.note_saved()
        self.newest = Published(step, step_folder(self._run, step), time.perf_counter() - self._started)
        after_saving(self._run, step, self._config.trainer, self._reported)

    def _write(self, moment: _Moment, engine_files: EngineFiles) -> None:
        engines, trainer = self._engines.values(), self._config.trainer
        check_before_saving(self._run, engines, trainer, engine_files.group)
        with new_checkpoint(self._run, moment.step) as folder:
            for log in moment.logs:
                log.sync()
            engine_files.write(folder)
            if trainer.save_state:
                write_run(
                    folder,
                    self._config,
                    step=moment.step,
                    parts=moment.parts,
                    files=self._files,
                    begun_from=self.begun_from,
                    log_lengths=moment.log_lengths,
                )
            shares = engine_files.hash_shares(folder)
            meshes = {engine.role: asdict(engine.mesh) for engine in engines}
            write_manifest(folder, shares, step=moment.step, meshes=meshes, metrics=moment.metrics, all_finite=True)
