"""What recipes that train on given rows share: the rows, the loop over their batches, and metrics of held-out ones."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from shardwise.config import BatchTrainerConfig, DistillConfig, PreferenceConfig, SFTConfig, allows_other_rows
from shardwise.config.data import SequenceDataConfig
from shardwise.controller.watchdog import go_on
from shardwise.data import BatchLoader, Loaded
from shardwise.data.loader import RowRecord, compare_rows, steps_of
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.opened_model import OpenedModel
from shardwise.recipes.run import Run
from shardwise.types import Metrics, MetricValue, Sample


@dataclass(slots=True)
class TrainingRows:
    """The rows of a run. A row is one sample, or several consecutive ones that are compared with each other."""

    samples: list[Sample]
    held_out: list[Sample] | None
    """None if the run does not validate."""
    samples_per_row: int
    total_steps: int
    counts: Metrics
    """Metrics data/...: how much was read and how much was left out."""
    loader: BatchLoader
    digest: str
    """Of the tokens of the samples."""
    rows_may_differ: bool
    """Whether they may differ from the rows of the run that is resumed."""
    _num_steps: int = field(default=0, init=False)
    """Steps that have taken `_num_taken` rows."""
    _num_taken: int = field(default=0, init=False)

    def batch(self, step: int) -> list[Sample]:
        """Takes the samples of a step; steps count from 1."""
        begin = self._num_taken + (step - 1 - self._num_steps) * self.loader.batch_size
        self._num_steps, self._num_taken = step, begin + self.loader.batch_size
        size = self.samples_per_row
        return [self.samples[size * row + place] for row in self.loader.indices(begin) for place in range(size)]

    def state_dict(self) -> dict[str, Any]:
        """Returns what determines the rows of later steps: how many there are and were taken, and their digest."""
        return {**asdict(self._record), "num_steps": self._num_steps, "num_taken": self._num_taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on behind the rows that were taken, also in batches of another size; early states, which do not know,
        are of this size. Raises DataError: the number of rows differs from that in the state, and may not."""
        before = RowRecord(state["num_rows"], state.get("digest"))
        compare_rows(before, self._record, may_differ=self.rows_may_differ)
        self._num_steps, self._num_taken = state.get("num_steps", 0), state.get("num_taken", 0)

    @property
    def _record(self) -> RowRecord:
        return RowRecord(self.loader.num_rows, self.digest)


def open_rows(
    read: Callable[..., Loaded[Sample]],
    data: SequenceDataConfig,
    trainer: BatchTrainerConfig,
    model: OpenedModel,
    *,
    samples_per_row: int = 1,
    companions: Sequence[OpenedModel] = (),
) -> TrainingRows:
    """Reads the training and the held-out rows.

    Args:
        read: (data, files, tokenizer, max_rows, media_token_ids, on_row) -> samples, e.g. `supervised_samples`.
        companions: other models that read the same tokens.
    Raises:
        DataError: a file or row that cannot be used. ConfigError: sequences longer than the model's context.
    """
    model.context.require(f"data.max_sequence_tokens={data.max_sequence_tokens}", data.max_sequence_tokens)
    for one in (model, *companions):
        one.warn_of_refused_images()
    media_token_ids = {token_id for one in (model, *companions) for token_id in one.media_token_ids}
    read_files = partial(read, data, tokenizer=model.tokenizer, media_token_ids=media_token_ids, on_row=go_on)
    found = read_files(data.train_files, max_rows=data.max_train_rows)
    held_out = None
    if data.validation_files:
        held_out = read_files(data.validation_files, max_rows=data.max_validation_rows).rows
    num_rows = len(found.rows) // samples_per_row
    loader = BatchLoader(num_rows, trainer.batch_size, seed=trainer.seed, shuffle=data.shuffle)
    return TrainingRows(
        samples=found.rows,
        held_out=held_out,
        samples_per_row=samples_per_row,
        total_steps=trainer.total_steps
        or steps_of(trainer.num_epochs, num_rows=num_rows, batch_size=trainer.batch_size),
        counts={f"data/{name}": MetricValue.max(count) for name, count in found.counts.items()},
        loader=loader,
        digest=found.digest(),
        rows_may_differ=allows_other_rows(trainer.resume_allow),
    )


def writer_source(config: SFTConfig | DistillConfig | PreferenceConfig, model: OpenedModel) -> EngineSource:
    """Returns the source of the engine that learns to write the answers of a run's rows."""
    return EngineSource(
        model=model.config,
        layout=config.engine,
        turn_end_id=model.turn_end_id if config.data.apply_chat_template else None,
        seed=config.trainer.seed,
    )


def train_on_rows(
    run: Run,
    rows: TrainingRows,
    *,
    step: Callable[[list[Sample]], Metrics],
    validate: Callable[[list[Sample]], Metrics],
    score: Callable[[list[Sample]], list[Sample]] | None = None,
) -> None:
    """Makes every step of a run, and validates where it is due.

    Args:
        step: makes an optimizer step on a batch, and returns its metrics.
        validate: returns the metrics of held-out rows.
        score: adds to a batch what the optimizer step compares it with, before it is made.
    """
    for number in run.steps():
        batch = rows.batch(number)
        if score is not None:
            with run.spans("logprobs"):
                batch = score(batch)
        with run.spans("train"):
            metrics = step(batch)
        if rows.held_out is not None and run.should_validate(number):
            with run.spans("validate"):
                metrics |= validate(rows.held_out)
        run.report(number, metrics | rows.counts, num_tokens=sum(len(sample.token_ids) for sample in batch))


def held_out_metrics(losses: Tensor, metrics: Metrics) -> Metrics:
    """Returns val/loss, the mean of the losses, and the loss's other metrics by their last name under val/."""
    renamed = {f"val/{name.rpartition('/')[2]}": value for name, value in metrics.items()}
    return {"val/loss": MetricValue.mean(float(losses.sum()), len(losses)), **renamed}
