"""What every training run does around its steps: the output folder, logs, progress, checkpoints, resuming from one."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol, Self

from shardwise.config import ConfigError, ExportError, RLConfig, TrainingConfig
from shardwise.console import counted, warn
from shardwise.controller.base import WorkerGroup
from shardwise.controller.failures import is_lost_peer
from shardwise.controller.watchdog import enter_phase, enter_step
from shardwise.engine import named_failures
from shardwise.observability import METRICS, LogFile, Progress, RunLog, SampleLog, Spans, move_aside
from shardwise.recipes.checkpointing.checkpoints import CHECKPOINTS, step_folders, write_latest
from shardwise.recipes.checkpointing.fingerprints import fingerprints
from shardwise.recipes.checkpointing.loader import Loader
from shardwise.recipes.checkpointing.manifest import Manifest
from shardwise.recipes.checkpointing.publishing import NONFINITE, remove_leftovers
from shardwise.recipes.checkpointing.resume import find_start
from shardwise.recipes.checkpointing.retention import Reported
from shardwise.recipes.checkpointing.saver import Saver
from shardwise.recipes.checkpointing.writer_lock import no_place, writer_lock
from shardwise.recipes.engines import RemoteEngine
from shardwise.recipes.stopping import Stopped, Stopping
from shardwise.recipes.stragglers import slow_rank, straggler_metrics, stragglers, without_busy
from shardwise.types import Metrics

SHOWN_METRICS = ("reward/mean", "val/accuracy", "train/loss", "val/loss", "val/divergence")


class Stateful(Protocol):
    """A part of a recipe that keeps something from step to step."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, JSON-serializable."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the part that gave the state was."""
        ...


def is_finished(config: TrainingConfig, *, total_steps: int) -> bool:
    """Returns whether a run that is resumed has no step left, and tells so. It need not be built then, and its folder,
    where another process may be at work, stays as it is.

    Raises:
        ConfigError: as Run, or trainer.resume names a checkpoint of another folder that has no step left. ModelError:
            as Run.
    """
    start = find_start(config)
    if start is None or start.step < total_steps:
        return False
    how = (
        f"{start.checkpoint} has done {start.step} steps, and the run is of {total_steps}; a larger "
        "trainer.total_steps continues it, trainer.resume=never starts anew and moves it aside"
    )
    if not start.in_place:
        raise ConfigError(f"trainer.resume={config.trainer.resume} leaves nothing to do: {how}")
    print(f"{config.command}: nothing to do: {how}", flush=True)
    return True


class Run:
    """A training run in `trainer.output_dir`. A context manager: inside it, engines and parts are where the checkpoint
    that it resumes from was, if there is one.

    Writes config.yaml, metrics.jsonl, performance.jsonl, tensorboard/ and checkpoints/step_N/. Files of an earlier run
    in the same folder are continued where trainer.resume says so; else they are moved aside, never overwritten.
    """

    def __init__(
        self,
        config: TrainingConfig,
        *,
        engines: Mapping[str, RemoteEngine],
        parts: Mapping[str, Stateful],
        total_steps: int,
        frozen: Sequence[RemoteEngine] = (),
    ) -> None:
        """
        Args:
            engines: what checkpoints hold, by subfolder; "" is the model that the run is about.
            frozen: the others that were loaded.
            parts: what else they hold the state of, by name.
        Raises:
            ConfigError: trainer.resume names no checkpoint, or the config is another one than that was trained with.
            ModelError: no checkpoint is whole, or the newest is not and trainer.resume_fallback=fail.
        """
        self._engines = engines
        self._parts = parts
        self._trainer = config.trainer
        self._total_steps = total_steps
        self._config = config
        self._files = fingerprints(config)
        self._start = find_start(config, files=self._files)
        self.output_dir = Path(self._trainer.output_dir)
        self.spans = Spans(enter_phase)
        self._stopping = Stopping(self._trainer)
        self._step_start = 0.0
        self._reported = Reported()
        self._frozen = frozen
        self._log_files: list[LogFile] = []
        self._loaded: dict[str, float] = {}
        """For the first row of performance.jsonl that is written."""
        self._loader = Loader(engines)
        self._saver = Saver(self.output_dir, config, engines, self._reported, files=self._files)

    @property
    def _keeps_lines(self) -> bool:
        """Whether lines of logs that cannot be written wait until they can."""
        return self._trainer.on_save_error == "continue"

    @property
    def first_step(self) -> int:
        """The number of the next step."""
        return 1 if self._start is None else self._start.step + 1

    @property
    def last_logged_step(self) -> int | None:
        """The step after which this folder's logs are continued; None if they begin anew."""
        return self._start.step if self._start is not None and self._start.in_place else None

    @property
    def _log_lengths(self) -> Mapping[str, int]:
        """Bytes that each log had when the checkpoint was saved; fewer now means that lines were lost."""
        return {} if self._start is None else self._start.log_lengths

    def sample_log(self) -> SampleLog:
        """Opens samples.jsonl beside the other logs; it is closed with them."""
        log = SampleLog(
            self.output_dir, last_step=self.last_logged_step, lengths=self._log_lengths, keeps_lines=self._keeps_lines
        )
        self._log_files += log.files
        return self._open.enter_context(log)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._lock = stack.enter_context(writer_lock(self.output_dir))
            self._start = find_start(self._config, files=self._files, reader=self._loader)
            self._saver.begun_from = None if self._start is None else self._start.begun_from
            self._restore()
            self._load_initial_weights()
            self._loaded = {
                "load/bytes_read": sum(engine.num_bytes_read for engine in (*self._engines.values(), *self._frozen))
            }
            self._warn_of_lost_checkpoints()
            self._prepare_folder()
            log = RunLog(
                self.output_dir,
                tensorboard=self._trainer.tensorboard,
                last_step=self.last_logged_step,
                lengths=self._log_lengths,
                keeps_lines=self._keeps_lines,
            )
            self._log = stack.enter_context(log)
            self._log_files += log.files
            self._announce()
            progress = Progress(
                self._config.command,
                self._total_steps,
                start_step=self.first_step - 1,
                doing=lambda: self.spans.current,
            )
            self._progress = stack.enter_context(progress)
            stack.enter_context(self._stopping)
            self._open = stack.pop_all()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or not is_lost_peer(error):  # a rank that is gone or hangs holds up its part of a save too
            with suppress(Exception):  # `steps` has raised what there was, unless something else came first
                self._saver.wait()
        try:
            with named_failures(self.output_dir):
                self._open.close()
        except ExportError as lost_lines:
            if error is None or isinstance(error, Stopped):
                raise
            if str(lost_lines) != str(error):  # of which the run ends
                warn(f"the last lines of logs are lost: {lost_lines}")
        finally:
            self._tell_newest()

    def _tell_newest(self) -> None:
        if (saved := self._saver.newest) is not None and saved.folder.is_dir():
            print(f"{self._config.command}: saved {saved.folder}", flush=True)

    def steps(self) -> Iterator[int]:
        """Yields the steps to do, up to total_steps; saves a checkpoint where the config asks for one, after the last
        step, and before it stops.

        Raises:
            Stopped: a signal or the time limit asked for it.
            ExportError, NotFiniteError: a checkpoint could not be saved, and trainer.on_save_error=stop or it is the
                last one. ConfigError: the metric of trainer.keep_best is never reported.
        """
        for step in range(self.first_step, self._total_steps + 1):
            enter_step(step)
            self._step_start = time.perf_counter()
            for name, engine in self._engines.items():
                engine.bundle = str(self.output_dir / NONFINITE / "_".join(filter(None, (f"step_{step}", name))))
            yield step
            self._stopping.count_step(time.perf_counter() - self._step_start)
            self._saver.check()
            is_saved = self._is_due(self._trainer.save_every_steps, step)
            if is_saved:
                self._save(step)
            saved = self._saver.newest
            save_seconds = None if saved is None else saved.seconds
            if step < self._total_steps and self._stopping.is_due(save_seconds=save_seconds):
                if not is_saved:
                    self._save(step)
                self._saver.finish()
                raise self._stopping.stopped(step)
        self._saver.finish()

    def should_validate(self, step: int) -> bool:
        """Whether validation is due: after every `validate_every_steps` steps, and after the last one."""
        return self._is_due(self._trainer.validate_every_steps, step)

    def report(
        self, step: int, metrics: Metrics, *, num_tokens: int, incidents: Mapping[str, float] | None = None
    ) -> None:
        """Writes the metrics of a step everywhere, and how long it took.

        Args:
            num_tokens: tokens processed in the step.
            incidents: events of the step that changed no number, such as restarts; logged with the times.
        """
        seconds = time.perf_counter() - self._step_start
        metrics, busy = without_busy(metrics)
        values = {name: value.result() for name, value in metrics.items() if not value.is_empty}
        slowest = stragglers(busy)
        performance = {**self.spans.take(), "seconds/step": seconds, "tokens_per_second": num_tokens / seconds}
        performance |= self._loaded | dict(incidents or {})
        self._loaded = {}
        performance |= straggler_metrics(slowest)
        if (saved := self._saver.newest) is not None:
            performance |= {"save/step": saved.step, "save/seconds": saved.seconds}
        if self._saver.num_failures:
            performance["save/failures"] = self._saver.num_failures
        self._lock.require()
        with named_failures(self.output_dir):
            self._log.log(step, values, performance)
        self._reported.add(values, names=metrics.keys(), validates=self.should_validate(step))
        shown = {name: values[name] for name in SHOWN_METRICS if name in values}
        shown |= slow_rank(slowest, step_seconds=seconds)
        if saved is not None:
            shown["saved step"] = saved.step
        self._progress.update(step, {"tokens/s": performance["tokens_per_second"], **shown})

    def _is_due(self, every: int, step: int) -> bool:
        return step == self._total_steps or (every > 0 and step % every == 0)

    def _restore(self) -> None:
        """Restores the parts from the checkpoint, and loads the weights of engines whose states are lost."""
        if self._start is None:
            return
        if self._start.parts is not None:
            for name, part in self._parts.items():
                part.load_state_dict(self._start.parts[name])
        self._loader.load_weights_alone(self._start.checkpoint, self._start.lost_states)

    def _load_initial_weights(self) -> None:
        """Loads the initial weights of engines that got none from a checkpoint."""
        for engine in self._engines.values():
            engine.load_initial_weights()

    def _warn_of_lost_checkpoints(self) -> None:
        """Warns where checkpoints may be lost: a disk that is not mounted looks like a folder without any."""
        metrics = self.output_dir / METRICS
        if self._start is None and self._trainer.resume == "auto" and metrics.exists() and metrics.stat().st_size:
            warn(
                f"{metrics} is of a run of which {self.output_dir / CHECKPOINTS} holds nothing to resume from; starts "
                "at the beginning and moves its logs aside"
            )

    def _prepare_folder(self) -> None:
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.output_dir)
            newest = next(iter(step_folders(self.output_dir).values()), None)
            moved = {path: move_aside(path) for path in self._left_by_others()}
            if newest is not None:
                self._warn_of_moved_checkpoint(newest, moved)
            if self.last_logged_step is not None:
                write_latest(self.output_dir, self.last_logged_step)
            (self.output_dir / "config.yaml").write_text(self._config.to_yaml(), encoding="utf-8")
            self._require_shared_folder()
        except OSError as error:
            raise no_place(self.output_dir, "trainer.output_dir", error) from None

    def _require_shared_folder(self) -> None:
        """Raises ConfigError: a rank does not see the output folder, and its part of checkpoints would be lost."""
        if self._group.size == 1:
            return
        with NamedTemporaryFile(dir=self.output_dir, prefix=".seen_by_every_rank.") as file:
            hosts = self._group.call("sees", file.name)
        blind = [f"rank {rank} on {host}" for rank, host in enumerate(hosts) if host is not None]
        if blind:
            raise ConfigError(
                f"trainer.output_dir={self.output_dir}: what rank 0 writes there is not seen by {', '.join(blind)}; "
                "give a folder on a file system that all hosts share"
            )

    def _left_by_others(self) -> list[Path]:
        """Returns what in the folder is not this run's: everything, or checkpoints after the one it resumes from."""
        last = self.last_logged_step
        if last is None:
            return [self.output_dir / name for name in (CHECKPOINTS, NONFINITE, "config.yaml")]
        return [folder for step, folder in step_folders(self.output_dir).items() if step > last]

    def _warn_of_moved_checkpoint(self, newest: Path, moved: Mapping[Path, Path | None]) -> None:
        """Where trainer.resume names a path, what is moved aside for it may be further on, and be what was meant."""
        if self._trainer.resume in ("auto", "never") or self._start is None or self._start.damage:
            return
        now, folder = moved.get(newest), moved.get(newest.parent)
        if folder is not None:
            now = folder / newest.name
        if now is not None:
            warn(
                f"trainer.resume={self._trainer.resume}: checkpoints of {self.output_dir} that did not begin there are "
                f"moved aside; to go on from their newest instead, give trainer.resume={now}"
            )

    def _announce(self) -> None:
        model = self._engines[""]
        ranks, steps = counted(self._group.size, "rank"), counted(self._total_steps, "step")
        if isinstance(self._config, RLConfig) and (split := self._config.rollout.split) is not None:
            ranks += f" and {counted(split.num_ranks, 'sampling rank')}"
        print(f"{self._config.command}: {model.size} on {ranks}, {steps}, into {self.output_dir}", flush=True)
        if self._start is not None:
            for damage in self._start.damage:
                warn(f"{damage}; that checkpoint is passed over, and kept with a number behind its name (step_N.1)")
            for state, damage in self._start.lost_states.items():
                warn(
                    f"{damage}; {state} resumes from the weights of {self._start.checkpoint} without the optimizer's "
                    "states, which begin anew (trainer.resume_fallback=weights)"
                )
            if not Manifest.read(self._start.checkpoint).all_finite:
                doubt = "was not looked through for NaN and infinities when it was written"
                warn(f"{self._start.checkpoint} {doubt}")
            print(f"{self._config.command}: resumes from {self._start.checkpoint}", flush=True)

    def _save(self, step: int) -> None:
        with self.spans("save"):
            self._saver.save(step, {name: part.state_dict() for name, part in self._parts.items()}, self._log_files)

    @property
    def _group(self) -> WorkerGroup:
        return self._engines[""].group
