"""What every training run does around its steps: the output folder, logs, progress and checkpoints."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from shardwise.config import Config, ConfigError, TrainerConfig
from shardwise.observability import Progress, RunLog, Spans, move_aside
from shardwise.recipes.engines import RemoteEngine
from shardwise.types import Metrics

SHOWN_METRICS = ("reward/mean", "val/accuracy", "train/loss", "val/loss", "val/divergence")


class Run:
    """A training run in `trainer.output_dir`. A context manager.

    Writes config.yaml, metrics.jsonl, performance.jsonl, tensorboard/ and checkpoints/step_N/hf/. Files of an earlier
    run in the same folder are moved aside, never overwritten.
    """

    def __init__(
        self,
        title: str,
        config: Config,
        trainer: TrainerConfig,
        *,
        engines: Mapping[str, RemoteEngine],
        total_steps: int,
    ) -> None:
        """Args:
        engines: what checkpoints hold, by subfolder; "" is the model that the run is about.
        """
        self._engines = engines
        self._trainer = trainer
        self._total_steps = total_steps
        self._title = title
        self._config = config
        self.output_dir = Path(trainer.output_dir)
        self.spans = Spans()
        self._step_start = 0.0
        self._newest: Path | None = None

    def __enter__(self) -> Self:
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            for name in ("checkpoints", "config.yaml"):
                move_aside(self.output_dir / name)
            (self.output_dir / "config.yaml").write_text(self._config.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"trainer.output_dir={self.output_dir} cannot be written to: {error}") from None
        with ExitStack() as stack:
            self._log = stack.enter_context(RunLog(self.output_dir, tensorboard=self._trainer.tensorboard))
            model = self._engines[""]
            ranks = "rank" if model.group.size == 1 else "ranks"
            steps = "step" if self._total_steps == 1 else "steps"
            print(
                f"{self._title}: {model.size} on {model.group.size} {ranks}, {self._total_steps} {steps}, "
                f"into {self.output_dir}",
                flush=True,
            )
            self._progress = stack.enter_context(Progress(self._title, self._total_steps))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()
        if self._newest is not None:
            print(f"{self._title}: saved {self._newest}", flush=True)

    def steps(self) -> Iterator[int]:
        """Yields 1 .. total_steps; saves a checkpoint where the config asks for one, and after the last step."""
        for step in range(1, self._total_steps + 1):
            self._step_start = time.perf_counter()
            yield step
            if self._is_due(self._trainer.save_every_steps, step):
                self._save(step)

    def should_validate(self, step: int) -> bool:
        """After every `validate_every_steps`, and after the last step."""
        return self._is_due(self._trainer.validate_every_steps, step)

    def report(self, step: int, metrics: Metrics, *, num_tokens: int) -> None:
        """Writes the metrics of a step everywhere, and how long it took; `num_tokens` were processed in it."""
        seconds = time.perf_counter() - self._step_start
        values = {name: value.result() for name, value in metrics.items()}
        performance = {**self.spans.take(), "seconds/step": seconds, "tokens_per_second": num_tokens / seconds}
        self._log.log(step, values, performance)
        shown = {name: values[name] for name in SHOWN_METRICS if name in values}
        self._progress.update(step, {"tokens/s": performance["tokens_per_second"], **shown})

    def _is_due(self, every: int, step: int) -> bool:
        return step == self._total_steps or (every > 0 and step % every == 0)

    def _save(self, step: int) -> None:
        with self.spans("save"):
            path = self.output_dir / "checkpoints" / f"step_{step}"
            for name, engine in self._engines.items():
                engine.save(str(path / name))
        self._newest = path
