"""Supervised fine-tuning."""

from collections.abc import Sequence

from shardwise.config import SFTConfig
from shardwise.controller.base import WorkerGroup
from shardwise.data import BatchLoader, Loaded, supervised_samples
from shardwise.recipes.build import open_model
from shardwise.recipes.engines import RemoteEngine, build_engine, load_metrics
from shardwise.recipes.run import Run
from shardwise.types import Metrics, MetricValue, Sample


def train(config: SFTConfig, group: WorkerGroup) -> None:
    """Runs the whole recipe. One step is one optimizer step on `trainer.batch_size` sequences."""
    model = open_model(config.model)
    model.require_context("data.max_sequence_tokens", config.data.max_sequence_tokens)
    rows = _load(config, config.data.train_files, config.data.max_train_rows, model.tokenizer)
    validation = None
    if config.data.validation_files:
        validation = _load(config, config.data.validation_files, config.data.max_validation_rows, model.tokenizer).rows
    loader = BatchLoader(
        len(rows.rows), config.trainer.batch_size, seed=config.trainer.seed, shuffle=config.data.shuffle
    )
    total_steps = config.trainer.total_steps or loader.steps_per_epoch * config.trainer.num_epochs
    policy = build_engine(
        group,
        "policy",
        model.config,
        config.engine,
        optimizer=config.trainer.optimizer_config(),
        total_steps=total_steps,
        seed=config.trainer.seed,
    )
    counts = load_metrics(policy) | {f"data/{name}": MetricValue.max(count) for name, count in rows.counts.items()}
    with Run(
        "sft",
        config,
        config.trainer,
        engines={"": policy},
        total_steps=total_steps,
    ) as run:
        for step in run.steps():
            samples = [rows.rows[index] for index in loader.indices(step - 1)]
            with run.spans("train"):
                metrics = policy.train(samples)
            if validation is not None and run.should_validate(step):
                with run.spans("validate"):
                    metrics |= validate(policy, validation)
            run.report(step, metrics | counts, num_tokens=sum(len(sample.token_ids) for sample in samples))


def validate(policy: RemoteEngine, samples: Sequence[Sample]) -> Metrics:
    """The mean cross-entropy per trained token, in nats."""
    total = -sum(float(values.double().sum()) for values in policy.score(samples))
    return {"val/loss": MetricValue.mean(total, sum(int(sample.loss_mask.sum()) for sample in samples))}


def _load(config: SFTConfig, files: list[str], max_rows: int | None, tokenizer: object) -> Loaded[Sample]:
    return supervised_samples(config.data, files, tokenizer, max_rows=max_rows)
