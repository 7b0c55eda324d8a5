"""Offline distillation: a student learns a teacher's distributions over the whole vocabulary, on given answers."""

from collections.abc import Sequence
from functools import partial

from shardwise.config import DistillConfig, longest_sequence
from shardwise.controller.base import WorkerGroup
from shardwise.data import supervised_samples
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.engines import RemoteEngine, build_engine
from shardwise.recipes.opened_model import open_companion, open_model, shared_vision
from shardwise.recipes.rows import open_rows, train_on_rows, writer_source
from shardwise.recipes.run import Run, is_finished
from shardwise.types import Metrics, MetricValue, Sample


def train(config: DistillConfig, group: WorkerGroup) -> None:
    """Runs the whole recipe. One step is one optimizer step on `trainer.batch_size` sequences."""
    model, trainer = open_model(config.model), config.trainer
    said, num_tokens = longest_sequence(config)
    teacher_model = open_companion(config.teacher.model, model, said=said, num_tokens=num_tokens)
    read = partial(supervised_samples, vision=shared_vision(model.vision, {"teacher.model": teacher_model}))
    rows = open_rows(read, config.data, trainer, model, companions=[teacher_model])
    if is_finished(config, total_steps=rows.total_steps):
        return
    source = EngineSource(model=teacher_model.config, layout=config.teacher.layout(config.engine))
    teacher = build_engine(group, "teacher", source)
    student = build_engine(
        group,
        "student",
        writer_source(config, model),
        optimizer=trainer.optimizer_config(),
        total_steps=rows.total_steps,
    )
    group.call("check_teacher", student.role, teacher.role)
    student.use_loss("distillation", config.distillation)
    with Run(
        config,
        parts={"rows": rows},
        engines={"": student},
        frozen=[teacher],
        total_steps=rows.total_steps,
    ) as run:
        train_on_rows(
            run, rows, step=partial(student.train, teacher=teacher), validate=partial(validate, student, teacher)
        )


def validate(student: RemoteEngine, teacher: RemoteEngine, samples: Sequence[Sample]) -> Metrics:
    """Returns the mean divergence per trained token, in nats."""
    total = sum(float(values.double().sum()) for values in student.divergence(samples, teacher))
    return {"val/divergence": MetricValue.mean(total, sum(int(sample.loss_mask.sum()) for sample in samples))}
