"""Supervised fine-tuning."""

from collections.abc import Sequence

from shardwise.config import SFTConfig
from shardwise.controller.base import WorkerGroup
from shardwise.data import BatchLoader, Loaded, pack, supervised_samples
from shardwise.recipes.build import open_model
from shardwise.recipes.run import Run
from shardwise.types import Metrics, MetricValue, Sample, merge_metrics


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
    num_parameters: int = group.call(
        "build_policy",
        model.config.model_dump_json(),
        config.engine.model_dump_json(),
        config.trainer.optimizer_config().model_dump_json(),
        total_steps,
    )[0]
    counts: Metrics = {f"data/{name}": MetricValue.max(count) for name, count in rows.counts.items()}
    with Run(
        "sft", config, model.config, config.trainer, group=group, total_steps=total_steps, num_parameters=num_parameters
    ) as run:
        for step in run.steps():
            samples = [rows.rows[index] for index in loader.indices(step - 1)]
            with run.spans("train"):
                metrics = train_step(group, samples, max_tokens=config.engine.max_tokens_per_micro_batch)
            if validation is not None and run.should_validate(step):
                with run.spans("validate"):
                    metrics |= validate(group, validation, max_tokens=config.engine.max_tokens_per_micro_batch)
            run.report(step, metrics | counts, num_tokens=sum(len(sample.token_ids) for sample in samples))


def train_step(group: WorkerGroup, samples: Sequence[Sample], *, max_tokens: int) -> Metrics:
    """Packs the samples, spreads them over the ranks and makes one optimizer step.

    Returns:
        Metrics that merge over several optimizer steps: train/loss, train/num_tokens and train/num_sequences are means
        over the steps.
    """
    packed = pack(samples, num_shards=group.size, max_tokens=max_tokens)
    metrics = merge_metrics(group.scatter("train", packed.shards, packed.denominators))
    totals = {
        "train/loss": metrics["train/loss"].result(),  # the ranks' shares add up to the loss of the step
        "train/num_tokens": packed.denominators.num_tokens,
        "train/num_sequences": packed.denominators.num_sequences,
    }
    return metrics | {name: MetricValue.mean(total, 1) for name, total in totals.items()}


def validate(group: WorkerGroup, samples: Sequence[Sample], *, max_tokens: int) -> Metrics:
    """The mean cross-entropy per trained token, in nats."""
    packed = pack(samples, num_shards=group.size, max_tokens=max_tokens)
    logprobs = group.scatter("policy_logprobs", packed.shards)
    total = -sum(float(values.double().sum()) for shard in logprobs for values in shard)
    return {"val/loss": MetricValue.mean(total, packed.denominators.num_tokens)}


def _load(config: SFTConfig, files: list[str], max_rows: int | None, tokenizer: object) -> Loaded[Sample]:
    return supervised_samples(config.data, files, tokenizer, max_rows=max_rows)
