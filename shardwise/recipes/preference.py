"""Preference training: DPO, IPO, SimPO and ORPO on pairs of answers, KTO on labelled ones."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from shardwise.config import DataError, PreferenceConfig, frozen_layout
from shardwise.controller.base import WorkerGroup
from shardwise.data import labelled_samples, mismatched, preference_pairs
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.engines import RemoteEngine, build_engine
from shardwise.recipes.losses import preference_losses
from shardwise.recipes.opened_model import open_model
from shardwise.recipes.rows import held_out_metrics, open_rows, train_on_rows, writer_source
from shardwise.recipes.run import Run, is_finished
from shardwise.recipes.sample_fields import with_field
from shardwise.types import Metrics, MetricValue, Sample


def train(config: PreferenceConfig, group: WorkerGroup) -> None:
    """Runs the whole recipe. One step is one optimizer step on `trainer.batch_size` pairs, or answers of kto."""
    model, trainer, size = open_model(config.model), config.trainer, 2 if config.is_paired else 1
    read = preference_pairs if config.is_paired else labelled_samples
    rows = open_rows(partial(read, vision=model.vision), config.data, trainer, model, samples_per_row=size)
    if config.estimates_kl and rows.held_out is not None and len(rows.held_out) == 1:
        raise DataError(
            f"data.validation_files leave one row, and loss={config.loss.name} estimates its KL divergence from "
            "prompts with the answers to others; give at least 2"
        )
    if is_finished(config, total_steps=rows.total_steps):
        return
    policy = build_engine(
        group,
        "policy",
        writer_source(config, model),
        optimizer=trainer.optimizer_config(),
        total_steps=rows.total_steps,
    )
    reference = Reference(policy, config)
    rows = replace(
        rows,
        samples=reference.score_before_training(rows.samples),
        held_out=None if rows.held_out is None else reference.score_before_training(rows.held_out),
    )
    policy.use_loss("preference", config.loss, kl=0.0)
    with Run(
        config,
        parts={"rows": rows},
        engines={"": policy},
        frozen=reference.engines,
        total_steps=rows.total_steps,
    ) as run:
        train_on_rows(
            run,
            rows,
            score=lambda batch: score(batch, policy, reference, config),
            step=lambda batch: with_margin(policy.train(batch, keep_together=size)),
            validate=lambda held_out: validate(policy, reference, reference.score(held_out), config),
        )


SCORED_AT_A_TIME = 8192
"""Samples that the reference policy scores in one command before training."""


class Reference:
    """Where the reference policy's logprobs come from: a frozen engine, the policy without its adapters, the policy
    before its first step, or nowhere, where the loss needs none."""

    def __init__(self, policy: RemoteEngine, config: PreferenceConfig) -> None:
        self._config = config
        self._scorer: RemoteEngine | None = policy if config.uses_reference else None
        self.engines: list[RemoteEngine] = []
        """The frozen engines that were built for it."""
        if config.has_reference_engine:
            layout = frozen_layout(config.reference, config.engine)
            source = EngineSource(model=policy.source.model, layout=layout)
            self._scorer = build_engine(policy.group, "reference", source)
            self.engines.append(self._scorer)

    def score_before_training(self, samples: Sequence[Sample]) -> list[Sample]:
        """Adds ref_logprobs if they are all taken before the first step."""
        if self._config.reference_logprobs != "before_training":
            return list(samples)
        if self._scorer is not None:
            self._scorer.load_initial_weights()
        # In parts: all at once are copied several times, and no progress is seen until they are through.
        parts = (samples[start : start + SCORED_AT_A_TIME] for start in range(0, len(samples), SCORED_AT_A_TIME))
        return [scored for part in parts for scored in self._score(part)]

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """Adds ref_logprobs if they are taken in every step."""
        return self._score(samples) if self._config.reference_logprobs == "each_step" else list(samples)

    def _score(self, samples: Sequence[Sample]) -> list[Sample]:
        if self._scorer is None:
            return list(samples)
        starts_as_policy = self._config.reference_logprobs == "before_training"  # adapters it started with included
        scores = self._scorer.score(samples, with_adapters=starts_as_policy or self._config.engine.lora is None)
        return with_field(samples, "ref_logprobs", scores)


def score(
    batch: Sequence[Sample], policy: RemoteEngine, reference: Reference, config: PreferenceConfig
) -> list[Sample]:
    """Adds ref_logprobs to the batch of a step, and gives the loss the batch's KL divergence if it takes one."""
    scored = reference.score(batch)
    if config.estimates_kl:
        policy.use_loss("preference", config.loss, kl=kl_of_mismatched(scored, policy, reference, config))
    return scored


def kl_of_mismatched(
    samples: Sequence[Sample], policy: RemoteEngine, reference: Reference, config: PreferenceConfig
) -> float:
    """KTO's estimate of KL(policy || reference), in nats per sequence: over the whole batch, each prompt with an answer
    to another; never below 0 (Ethayarajh et al. 2024, section 4)."""
    others = reference.score(mismatched(samples, max_tokens=config.data.max_sequence_tokens))
    ratios = [
        float((logprobs.double() - sample.ref_logprobs).sum())
        for logprobs, sample in zip(policy.score(others), others, strict=True)
        if sample.ref_logprobs is not None
    ]
    return max(0.0, sum(ratios) / len(ratios))


def validate(
    policy: RemoteEngine, reference: Reference, samples: Sequence[Sample], config: PreferenceConfig
) -> Metrics:
    """val/loss, and the loss's own metrics under val/, on held-out rows; kto's KL divergence is of them too."""
    kl = kl_of_mismatched(samples, policy, reference, config) if config.estimates_kl else 0.0
    scores = policy.score(samples)
    ref_scores = [
        torch.zeros_like(values) if s.ref_logprobs is None else s.ref_logprobs
        for s, values in zip(samples, scores, strict=True)
    ]
    losses, metrics = preference_losses(config.loss, kl=kl)(
        torch.stack([values.sum() for values in scores]),
        torch.stack([values.sum() for values in ref_scores]),
        torch.stack([sample.loss_mask.sum() for sample in samples]).float(),
        torch.tensor([sample.reward for sample in samples]),
    )
    return held_out_metrics(losses, with_margin(metrics))


def with_margin(metrics: Metrics) -> Metrics:
    """Adds preference/margin where answers are not paired (kto) and both kinds are there: desirable ones' mean reward -
    undesirable ones'. A custom loss may have no rewards."""
    rewards = [metrics.get(f"preference/{side}_reward") for side in ("chosen", "rejected")]
    chosen, rejected = (MetricValue.mean(0.0, 0) if reward is None else reward.host() for reward in rewards)
    if not (chosen.count and rejected.count):
        return metrics
    return {"preference/margin": MetricValue.mean(chosen.result() - rejected.result(), 1), **metrics}
