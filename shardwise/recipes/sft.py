"""Supervised fine-tuning."""

from collections.abc import Sequence
from functools import partial

from shardwise.config import SFTConfig
from shardwise.controller.base import WorkerGroup
from shardwise.data import supervised_samples
from shardwise.recipes.engines import RemoteEngine, build_engine
from shardwise.recipes.opened_model import open_model
from shardwise.recipes.rows import open_rows, train_on_rows, writer_source
from shardwise.recipes.run import Run, is_finished
from shardwise.types import Metrics, MetricValue, Sample


def train(config: SFTConfig, group: WorkerGroup) -> None:
    """Runs the whole recipe. One step is one optimizer step on `trainer.batch_size` sequences."""
    model = open_model(config.model)
    rows = open_rows(partial(supervised_samples, vision=model.vision), config.data, config.trainer, model)
    if is_finished(config, total_steps=rows.total_steps):
        return
    policy = build_engine(
        group,
        "policy",
        writer_source(config, model),
        optimizer=config.trainer.optimizer_config(),
        total_steps=rows.total_steps,
    )
    with Run(config, parts={"rows": rows}, engines={"": policy}, total_steps=rows.total_steps) as run:
        train_on_rows(run, rows, step=policy.train, validate=partial(validate, policy))


def validate(policy: RemoteEngine, samples: Sequence[Sample]) -> Metrics:
    """Returns the mean cross-entropy per trained token, in nats."""
    total = -sum(float(values.double().sum()) for values in policy.score(samples))
    return {"val/loss": MetricValue.mean(total, sum(int(sample.loss_mask.sum()) for sample in samples))}
