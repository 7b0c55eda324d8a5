"""Binds the pure functions of `algorithms` to a config: what the engine calls per micro-batch."""

import torch
from torch import Tensor

from shardwise.algorithms import aggregate, cross_entropy, kl_divergence, mismatch_metrics, ppo_clip, trained_mean
from shardwise.config import AlgorithmConfig
from shardwise.engine import LossFn
from shardwise.types import Denominators, Metrics, TokenBatch, TokenOutputs


def sft_loss(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
    """Cross-entropy, token-mean over the whole step."""
    assert outputs.logprobs is not None
    losses = cross_entropy(outputs.logprobs, batch.loss_mask)
    loss = aggregate(
        losses,
        loss_mask=batch.loss_mask,
        cu_seqlens=batch.cu_seqlens,
        denominators=denominators,
        mode="token-mean",
        divisor=None,
    )
    return loss, {}


def distill_loss(*, cross_entropy_coef: float = 0.0) -> LossFn:
    """Divergence from a teacher, token-mean over the whole step, plus `cross_entropy_coef` times the cross-entropy of
    the data's tokens. Outputs need logprobs only where that is not 0."""

    def loss_fn(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        assert outputs.divergence is not None
        losses = outputs.divergence
        metrics = {"train/divergence": trained_mean(losses, batch.loss_mask)}
        if cross_entropy_coef:
            assert outputs.logprobs is not None
            data_losses = cross_entropy(outputs.logprobs, batch.loss_mask)
            metrics["train/cross_entropy"] = trained_mean(data_losses, batch.loss_mask)
            losses = losses + cross_entropy_coef * data_losses
        loss = aggregate(
            losses,
            loss_mask=batch.loss_mask,
            cu_seqlens=batch.cu_seqlens,
            denominators=denominators,
            mode="token-mean",
            divisor=None,
        )
        return loss, metrics

    return loss_fn


def policy_loss(config: AlgorithmConfig) -> LossFn:
    """The policy loss of reinforcement learning, with the KL term where it belongs to the loss."""

    def loss_fn(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        assert outputs.logprobs is not None
        assert outputs.entropy is not None
        assert batch.advantages is not None
        assert batch.rollout_logprobs is not None
        # With one optimizer step per rollout batch the policy is the one that sampled: the ratio is 1, not a constant.
        old_logprobs = outputs.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        match config.policy_loss:
            case "ppo_clip":
                losses, metrics = ppo_clip(
                    outputs.logprobs,
                    old_logprobs,
                    batch.advantages,
                    batch.loss_mask,
                    clip_low=config.clip_low,
                    clip_high=config.clip_high,
                    dual_clip=config.dual_clip,
                )
        metrics |= mismatch_metrics(old_logprobs, batch.rollout_logprobs, batch.loss_mask)
        metrics["policy/entropy"] = trained_mean(outputs.entropy, batch.loss_mask)
        if batch.ref_logprobs is not None:
            kl = kl_divergence(outputs.logprobs, batch.ref_logprobs, estimator=config.kl_estimator)
            metrics["policy/ref_kl"] = trained_mean(kl, batch.loss_mask)
            if config.kl_in == "loss":
                losses = losses + config.kl_coef * torch.where(batch.loss_mask, kl, 0.0)
        loss = aggregate(
            losses,
            loss_mask=batch.loss_mask,
            cu_seqlens=batch.cu_seqlens,
            denominators=denominators,
            mode=config.aggregation,
            divisor=config.aggregation_divisor,
        )
        return loss, metrics

    return loss_fn
