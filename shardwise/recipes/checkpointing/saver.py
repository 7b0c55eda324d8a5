"""Saves the checkpoints of a run: at once, or in the background while training continues."""

import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.config import ExportError, TrainingConfig
from shardwise.controller.base import RankSilentError, WorkerGroup
from shardwise.observability import LogFile
from shardwise.recipes.background_call import BackgroundCall
from shardwise.recipes.checkpointing.checkpoints import step_folder
from shardwise.recipes.checkpointing.fingerprints import Fingerprints
from shardwise.recipes.checkpointing.manifest import write_manifest
from shardwise.recipes.checkpointing.publishing import new_checkpoint
from shardwise.recipes.checkpointing.resume import STATE, Beginning, write_run
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
        background = self._group.background if self._config.trainer.async_save else None
        if background is None:
            with self._retries.tolerate():
                self._publish(moment, None)
        else:
            self._stage(background)
            moment = replace(moment, parts=deepcopy(moment.parts))
            self._pending = BackgroundCall(partial(self._publish, moment, background))

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
            if not pending.wait(deadline):
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

    def _publish(self, moment: _Moment, background: WorkerGroup | None) -> None:
        step = moment.step
        self._retries.retry(step, partial(self._write, moment, background))
        self._retries.note_saved()
        self.newest = Published(step, step_folder(self._run, step), time.perf_counter() - self._started)
        after_saving(self._run, step, self._config.trainer, self._reported)

    def _write(self, moment: _Moment, background: WorkerGroup | None) -> None:
        holders = self._group if background is None else background
        check_before_saving(self._run, self._engines.values(), self._config.trainer, holders)
        with new_checkpoint(self._run, moment.step) as folder:
            for log in moment.logs:
                log.sync()
            if background is None:
                self._write_live(folder)
            else:
                _write_staged(folder, background)
            if self._config.trainer.save_state:
                write_run(
                    folder,
                    self._config,
                    step=moment.step,
                    parts=moment.parts,
                    files=self._files,
                    begun_from=self.begun_from,
                    log_lengths=moment.log_lengths,
                )
            if background is None:
                shares = self._group.call("hash_files", str(folder))
            else:
                shares = _results(background, "hash_files", str(folder))
            meshes = {engine.role: asdict(engine.mesh) for engine in self._engines.values()}
            write_manifest(folder, shares, step=moment.step, meshes=meshes, metrics=moment.metrics, all_finite=True)

    def _write_live(self, folder: Path) -> None:
        for name, engine in self._engines.items():
            state = str(folder / state_subfolder(engine)) if self._config.trainer.save_state else ""
            engine.save(str(folder / name), state=state)

    def _stage(self, background: WorkerGroup) -> None:
        background.call("clear")
        for name, engine in self._engines.items():
            engine.stage(name)
        if self._config.trainer.save_state:
            for engine in self._engines.values():
                engine.stage_state(state_subfolder(engine))

    @property
    def _group(self) -> WorkerGroup:
        return self._engines[""].group


def state_subfolder(engine: RemoteEngine) -> str:
    """Returns the folder in a checkpoint that holds the training state of an engine."""
    return f"{STATE}/{engine.role.replace(' ', '_')}"


def _write_staged(folder: Path, background: WorkerGroup) -> None:
    written = _results(background, "write", str(folder))
    _results(background, "finish", str(folder), written)


def _results(background: WorkerGroup, method: str, *args: Any) -> list[Any]:
    """Returns the results of a call to every rank's CheckpointWriter. Raises ExportError: it failed on a rank."""
    outcomes = background.call(method, *args)
    for rank, outcome in enumerate(outcomes):
        if outcome["error"]:
            raise ExportError(outcome["error"] if len(outcomes) == 1 else f"rank {rank}: {outcome['error']}")
    return [outcome["result"] for outcome in outcomes]
