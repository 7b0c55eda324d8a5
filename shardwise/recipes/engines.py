"""Engines as recipes see them: on all ranks at once, taking samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from shardwise.config import (
    Config,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    SamplingConfig,
)
from shardwise.console import warn
from shardwise.controller.base import WorkerGroup
from shardwise.data import PackedStep, pack, unpack
from shardwise.engine import ParallelDims
from shardwise.engine.optim.schedule import missed_peak
from shardwise.engine.precision import emulated_dtype
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.losses import LossKind, LossSource
from shardwise.recipes.sampling.sampled_tokens import require_sampled
from shardwise.types import Metrics, MetricValue, Sample, merge_metrics

EMPTY_STEPS = "train/empty_steps"
"""A metric: how many optimizer steps had no trained token; absent if there were none."""


@dataclass(slots=True, kw_only=True, eq=False)
class RemoteEngine:
    """One engine, spread over the ranks of a group."""

    group: WorkerGroup
    role: str
    """Its name among the workers' engines, such as "policy"."""
    source: EngineSource
    num_parameters: int
    num_trained_parameters: int
    num_bytes_read: int
    """Bytes of weights read from the model folder, on the rank that read most."""
    has_weights: bool = True
    """Whether all weights are loaded: a frozen engine is built with them."""
    bundle: str = ""
    """The folder for the bundle that replays the next optimizer step if it is skipped; "" keeps none."""

    @property
    def mesh(self) -> ParallelDims:
        """The number of ranks on each axis of its mesh."""
        return ParallelDims.of(self.source.layout, world_size=self.group.size)

    @property
    def size(self) -> str:
        """Text for people: how many parameters it has, and how many of them are trained."""
        size = f"{_shown(self.num_parameters, decimals=1)} parameters"
        if self.num_trained_parameters < self.num_parameters:
            size += f" ({_shown(self.num_trained_parameters, decimals=2)} trained)"
        return size

    def score(
        self, samples: Sequence[Sample], *, with_adapters: bool = True, temperature: float | None = None
    ) -> list[Tensor]:
        """[L] float32 of every sample, in order: logprobs of a language model, values of a critic, scores of a reward
        model; 0 where nothing is scored. Without its adapters a model is the one it started from. `temperature`: the
        logprobs' temperature; None: the rollout's."""
        packed = self._pack(samples, keep_together=1)
        options = (with_adapters,) if temperature is None else (with_adapters, temperature)
        return unpack(packed, self.group.scatter("score", packed.shards, self.role, *options))

    def divergence(self, samples: Sequence[Sample], teacher: Self) -> list[Tensor]:
        """[L] float32 of every sample, in order: the divergence from the teacher that its loss names, in nats."""
        packed = self._pack(samples, keep_together=1, teacher=teacher)
        return unpack(packed, self.group.scatter("divergence", packed.shards, self.role, teacher.role))

    def train(self, samples: Sequence[Sample], *, keep_together: int = 1, teacher: Self | None = None) -> Metrics:
        """Packs the samples, spreads them over the ranks and makes one optimizer step.

        Args:
            keep_together: how many consecutive samples are compared with each other, and so share a micro-batch.
            teacher: the engine whose distributions the loss compares with.
        Returns:
            Metrics that merge over several optimizer steps: train/loss, train/num_tokens and train/num_sequences are
            means over the steps. A step without a trained token changes nothing and is counted in train/empty_steps.
        Raises:
            TrainingError: a token is not the one that a rollout engine sampled, if one sampled the samples.
        """
        packed = self._pack(samples, keep_together=keep_together, teacher=teacher)
        require_sampled(samples, packed)
        counts = packed.denominators
        if counts.num_tokens:
            roles = self.role, "" if teacher is None else teacher.role
            metrics = merge_metrics(self.group.scatter("train", packed.shards, counts, *roles, self.bundle))
            # The ranks' shares add up to the loss of the step.
            metrics["train/loss"] = MetricValue.mean(metrics["train/loss"].result(), 1)
        else:
            skipped, *_ = self.group.call("skip_step", self.role)
            metrics = skipped | {EMPTY_STEPS: MetricValue.sum(1)}
        totals = {"train/num_tokens": counts.num_tokens, "train/num_sequences": counts.num_sequences}
        return metrics | {name: MetricValue.mean(total, 1) for name, total in totals.items()}

    def use_loss(self, kind: LossKind, config: Config, **numbers: float) -> None:
        """Replaces the loss, cross-entropy at first, by one made from its config and from numbers that change during a
        run."""
        self.group.call("use_loss", self.role, LossSource.of(kind, config, **numbers).model_dump_json())

    def save(self, folder: str, *, state: str = "") -> None:
        """Writes its weights into `folder`: into hf/, and adapter/ if it has one. Writes what its training resumes from
        into the folder `state`, if one is named."""
        self.group.call("save", self.role, self.source.model.model_dump_json(), folder, state)

    def stage(self, subfolder: str) -> None:
        """Begins to copy what `save` would write; the ranks' CheckpointWriters put it into `subfolder` of the next
        checkpoint."""
        self.group.call("stage_weights", self.role, self.source.model.model_dump_json(), subfolder)

    def stage_state(self, subfolder: str) -> None:
        """Begins to copy what `save` would write into the folder `state`; see `stage`."""
        self.group.call("stage_state", self.role, subfolder)

    def load_initial_weights(self) -> None:
        """Reads the trained weights from its model folder, unless they are loaded already. Raises ModelError."""
        if not self.has_weights:
            self.num_bytes_read = max(self.group.call("load_initial_weights", self.role))
            self.has_weights = True

    def load_state(self, folder: str) -> str | None:
        """Resumes from the training state in `folder`, written on any layout. Returns what is damaged there; None if
        nothing is."""
        damage: str | None = self.group.call("load_state", self.role, folder)[0]
        self.has_weights |= damage is None
        return damage

    def load_weights_alone(self, folder: str, state: str) -> None:
        """Resumes from the weights that `save` wrote into `folder`, without the optimizer's states.

        Args:
            state: the training state that it wrote, of which only the numbers beside the tensors are read.
        """
        self.group.call("load_weights_alone", self.role, folder, state)
        self.has_weights = True

    def _pack(self, samples: Sequence[Sample], *, keep_together: int, teacher: Self | None = None) -> PackedStep:
        """Packs one shard for each rank, or for each group of ranks that share their sequences. A teacher works on the
        same micro-batches, so its cap limits them too."""
        layouts = [engine.source.layout for engine in (self, teacher) if engine is not None]
        return pack(
            samples,
            num_shards=self.group.size // self.source.layout.ulysses_size,
            max_tokens=min(layout.max_tokens_per_micro_batch for layout in layouts),
            keep_together=keep_together,
        )


def build_engine(
    group: WorkerGroup,
    role: str,
    source: EngineSource,
    *,
    optimizer: OptimizerConfig | None = None,
    optimizer_key: str = "trainer",
    total_steps: int = 1,
) -> RemoteEngine:
    """Builds an engine on every rank. A trained engine has no trained weights yet: a run that resumes takes them from a
    checkpoint and does not read those of the model folder.

    Args:
        optimizer: the optimizer of a trained engine (its layout is an EngineConfig); None for a frozen one.
        optimizer_key: config key of the optimizer, for warnings.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
    Raises:
        ConfigError, ModelError: as `TrainEngine.build`.
    """
    if optimizer is not None and (doubt := missed_peak(optimizer, total_steps, key=optimizer_key)):
        warn(doubt)
    if doubt := emulated_dtype(getattr(torch, source.layout.param_dtype)):
        warn(f"{role}: {doubt}")
    trained = () if optimizer is None else (optimizer.model_dump_json(), total_steps, False)
    built = group.call("build_engine", role, source.model_dump_json(), *trained)
    num_parameters, num_trained, _ = built[0]
    return RemoteEngine(
        group=group,
        role=role,
        source=source,
        num_parameters=num_parameters,
        num_trained_parameters=num_trained,
        num_bytes_read=max(num_bytes for *_, num_bytes in built),
        has_weights=optimizer is None,
    )


def build_rollout_engines(
    group: WorkerGroup,
    model: ModelConfig,
    sampling: SamplingConfig,
    param_dtype: str,
    *,
    lora: LoraConfig | None = None,
    shares_memory: bool = False,
) -> None:
    """Builds a rollout engine on every rank, or over several where rollout.engine says so.

    Args:
        param_dtype: as engine.param_dtype.
        lora: the adapter, if weight syncs bring it alone; None: they bring the whole model.
        shares_memory: the rank that sends weights may write straight into the engine's memory, if the engine can
            share it.
    """
    group.call(
        "build_rollout",
        model.model_dump_json(),
        sampling.model_dump_json(),
        param_dtype,
        "" if lora is None else lora.model_dump_json(),
        shares_memory,
    )


def _shown(number: int, *, decimals: int) -> str:
    """Formats a number in millions, or in thousands if it is less than 0.1 million."""
    return f"{number / 1e6:,.{decimals}f}M" if number >= 1e5 else f"{number / 1e3:,.{decimals}f}K"
