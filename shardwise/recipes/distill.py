"""Offline distillation: a student learns a teacher's distributions over the whole vocabulary, on given answers."""

from collections.abc import Sequence

from shardwise.config import DistillConfig
from shardwise.controller.base import WorkerGroup
from shardwise.data import BatchLoader, Loaded, supervised_samples
from shardwise.recipes.build import OpenedModel, open_companion, open_model
from shardwise.recipes.engines import RemoteEngine, build_engine, load_metrics
from shardwise.recipes.run import Run
from shardwise.types import Metrics, MetricValue, Sample


def train(config: DistillConfig, group: WorkerGroup) -> None:
    """Runs the whole recipe. One step is one optimizer step on `trainer.batch_size` sequences."""
    model, trainer = open_model(config.model), config.trainer
    model.require_context("data.max_sequence_tokens", config.data.max_sequence_tokens)
    rows = _load(config, model, config.data.train_files, config.data.max_train_rows)
    held_out = None
    if config.data.validation_files:
        held_out = _load(config, model, config.data.validation_files, config.data.max_validation_rows).rows
    loader = BatchLoader(len(rows.rows), trainer.batch_size, seed=trainer.seed, shuffle=config.data.shuffle)
    total_steps = trainer.total_steps or loader.steps_per_epoch * trainer.num_epochs
    teacher_model = open_companion(
        config.teacher.model, model, keys="data.max_sequence_tokens", num_tokens=config.data.max_sequence_tokens
    )
    teacher = build_engine(group, "teacher", teacher_model.config, config.teacher_layout())
    student = build_engine(
        group,
        "student",
        model.config,
        config.engine,
        optimizer=trainer.optimizer_config(),
        total_steps=total_steps,
        seed=trainer.seed,
    )
    group.call("check_teacher", student.role, teacher.role)
    student.use_loss("distillation", config.distillation)
    counts = load_metrics(student, teacher) | {f"data/{name}": MetricValue.max(n) for name, n in rows.counts.items()}
    with Run("distill", config, trainer, engines={"": student}, total_steps=total_steps) as run:
        for step in run.steps():
            samples = [rows.rows[index] for index in loader.indices(step - 1)]
            with run.spans("train"):
                metrics = student.train(samples, teacher=teacher)
            if held_out is not None and run.should_validate(step):
                with run.spans("validate"):
                    metrics |= validate(student, teacher, held_out)
            run.report(step, metrics | counts, num_tokens=sum(len(sample.token_ids) for sample in samples))


def validate(student: RemoteEngine, teacher: RemoteEngine, samples: Sequence[Sample]) -> Metrics:
    """The mean divergence per trained token, in nats."""
    total = sum(float(values.double().sum()) for values in student.divergence(samples, teacher))
    return {"val/divergence": MetricValue.mean(total, sum(int(sample.loss_mask.sum()) for sample in samples))}


def _load(config: DistillConfig, model: OpenedModel, files: list[str], max_rows: int | None) -> Loaded[Sample]:
    return supervised_samples(config.data, files, model.tokenizer, max_rows=max_rows)
