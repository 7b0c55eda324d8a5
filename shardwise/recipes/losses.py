"""Binds the pure functions of `algorithms` to a config: what the engine calls per micro-batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import TypeAdapter
from torch import Tensor

from shardwise.algorithms import (
    aggregate,
    bradley_terry,
    cispo,
    clip_cov,
    clipped_value_loss,
    cross_entropy,
    dpo,
    dppo_kl,
    dppo_tv,
    gmpo,
    gspo,
    ipo,
    kimi,
    kl_cov,
    kl_divergence,
    kto,
    mismatch_metrics,
    orpo,
    ppo_clip,
    reinforce,
    sapo,
    sequence_sums,
    simpo,
    topr,
    trained_mean,
)
from shardwise.config import (
    AlgorithmConfig,
    BradleyTerry,
    CriticConfig,
    DistillationConfig,
    JensenShannon,
    Kto,
    PreferenceLoss,
    TrainingError,
)
from shardwise.engine import Divergence, LossFn
from shardwise.rewards import load_function
from shardwise.types import Denominators, Metrics, TokenBatch, TokenOutputs

PolicyLossFn = Callable[..., tuple[Tensor, Metrics]]

POLICY_LOSSES: Mapping[str, PolicyLossFn] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "reinforce": reinforce,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "topr": topr,
    "kimi": kimi,
}
"""(logprobs, old_logprobs, advantages, loss_mask, cu_seqlens, parameters by keyword) -> losses per token, metrics."""

PREFERENCE_LOSSES: Mapping[str, PolicyLossFn] = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo}
"""(sums [P, 2], ref_sums [P, 2], lengths [P, 2], parameters by keyword) -> losses of pairs [P], metrics."""

LossKind = Literal["sft", "policy", "value", "preference", "reward_model", "distillation"]

_ANY_PREFERENCE: TypeAdapter[PreferenceLoss] = TypeAdapter(PreferenceLoss)


@dataclass(frozen=True, slots=True)
class Loss:
    """What an engine trains with."""

    function: LossFn
    with_logprobs: bool = True
    with_entropy: bool = False
    """Whether it looks at them; both cost passes over the logits."""
    divergence: Divergence | None = None
    """From its teacher, if it learns from one."""


def make_loss(kind: LossKind, config: str, numbers: Mapping[str, float]) -> Loss:
    """The loss of a kind from the JSON of its config and the numbers that change during a run."""
    match kind:
        case "sft":
            return SFT_LOSS
        case "policy":
            return Loss(policy_loss(AlgorithmConfig.model_validate_json(config), **numbers), with_entropy=True)
        case "value":
            return Loss(value_loss(CriticConfig.model_validate_json(config)))
        case "preference":
            return Loss(preference_loss(_ANY_PREFERENCE.validate_json(config), **numbers))
        case "reward_model":
            return Loss(reward_model_loss(BradleyTerry.model_validate_json(config)))
        case "distillation":
            return _distillation(DistillationConfig.model_validate_json(config))


def sft_loss(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
    """Cross-entropy, token-mean over the whole step."""
    assert outputs.logprobs is not None
    return _token_mean(cross_entropy(outputs.logprobs, batch.loss_mask), batch, denominators), {}


SFT_LOSS = Loss(sft_loss)


def _distillation(config: DistillationConfig) -> Loss:
    chosen = config.divergence
    beta = {"beta": chosen.beta} if isinstance(chosen, JensenShannon) else {}
    return Loss(
        distill_loss(cross_entropy_coef=config.cross_entropy_coef),
        with_logprobs=config.cross_entropy_coef > 0,
        divergence=Divergence(kind=chosen.name, temperature=config.temperature, **beta),
    )


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
        return _token_mean(losses, batch, denominators), metrics

    return loss_fn


def policy_loss(config: AlgorithmConfig, *, kl_coef: float) -> LossFn:
    """The policy loss of reinforcement learning, with the KL term at its present weight where it belongs to the
    loss."""
    token_losses_of = _policy_losses(config)

    def loss_fn(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        assert outputs.logprobs is not None
        assert outputs.entropy is not None
        assert batch.rollout_logprobs is not None
        # With one optimizer step per rollout batch the policy is the one that sampled: the ratio is 1, not a constant.
        old_logprobs = outputs.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        losses, metrics = token_losses_of(outputs.logprobs, old_logprobs, batch)
        if batch.weights is not None:
            losses = losses * batch.weights
        if not config.needs_old_logprobs:  # else they were compared before the first optimizer step
            metrics |= mismatch_metrics(outputs.logprobs.detach(), batch.rollout_logprobs, batch.loss_mask)
        metrics["policy/entropy"] = trained_mean(outputs.entropy, batch.loss_mask)
        if batch.ref_logprobs is not None:
            kl = kl_divergence(outputs.logprobs, batch.ref_logprobs, estimator=config.kl_estimator)
            metrics["policy/ref_kl"] = trained_mean(kl, batch.loss_mask)
            if config.kl_in == "loss":
                losses = losses + kl_coef * torch.where(batch.loss_mask, kl, 0.0)
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


def value_loss(config: CriticConfig) -> LossFn:
    """The critic's clipped squared error, token-mean over the whole step."""

    def loss_fn(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        assert outputs.values is not None
        assert batch.values is not None
        assert batch.returns is not None
        losses, metrics = clipped_value_loss(
            outputs.values, batch.values, batch.returns, batch.loss_mask, clip=config.value_clip
        )
        return _token_mean(losses, batch, denominators), metrics

    return loss_fn


def preference_loss(config: PreferenceLoss, *, kl: float) -> LossFn:
    """The mean loss of a step's pairs, or of its answers for kto."""
    losses_of = preference_losses(config, kl=kl)
    size = 1 if isinstance(config, Kto) else 2

    def loss_fn(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        assert outputs.logprobs is not None
        assert batch.rewards is not None
        reference = torch.zeros_like(outputs.logprobs) if batch.ref_logprobs is None else batch.ref_logprobs
        sums, ref_sums, lengths = (
            sequence_sums(torch.where(batch.loss_mask, values, 0.0), batch.cu_seqlens)[: len(batch.sample_index)]
            for values in (outputs.logprobs, reference, torch.ones_like(reference))
        )
        losses, metrics = losses_of(sums, ref_sums, lengths, batch.rewards[: len(batch.sample_index)])
        return losses.sum() * size / max(denominators.num_sequences, 1), metrics

    return loss_fn


def preference_losses(config: PreferenceLoss, *, kl: float) -> Callable[..., tuple[Tensor, Metrics]]:
    """(sums, ref_sums, lengths, rewards of sequences [S]) -> losses of pairs [S / 2], or of sequences for kto."""
    if isinstance(config, Kto):
        return lambda sums, ref_sums, _, rewards: kto(sums, ref_sums, rewards > 0, kl, **config.arguments())
    function = PREFERENCE_LOSSES[config.name]
    return lambda sums, ref_sums, lengths, _: function(
        sums.view(-1, 2), ref_sums.view(-1, 2), lengths.view(-1, 2), **config.arguments()
    )


def reward_model_loss(config: BradleyTerry) -> LossFn:
    """The mean Bradley-Terry loss of a step's pairs, with their margins."""

    def loss_fn(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        assert outputs.values is not None
        assert batch.rewards is not None
        num_sequences = len(batch.sample_index)  # 0 in a batch of one masked token
        scores = sequence_sums(outputs.values, batch.cu_seqlens)[:num_sequences].view(-1, 2)
        rewards = batch.rewards[:num_sequences].view(-1, 2)
        losses, metrics = bradley_terry(scores, rewards[:, 0] - rewards[:, 1], center_coef=config.center_coef)
        return losses.sum() * 2 / max(denominators.num_sequences, 1), metrics

    return loss_fn


def _policy_losses(config: AlgorithmConfig) -> Callable[[Tensor, Tensor, TokenBatch], tuple[Tensor, Metrics]]:
    """(logprobs [T], old_logprobs [T], batch) -> losses [T] and metrics of the chosen function."""
    chosen = config.policy_loss
    function: PolicyLossFn
    parameters: Mapping[str, Any] = chosen.arguments()
    match chosen.name:
        case "clip_cov":
            function, parameters = clip_cov, {"clip_low": chosen.clip_low, "clip_high": chosen.clip_high}
        case "kl_cov":
            function, parameters = kl_cov, {"coef": chosen.coef}
        case "custom":
            function, parameters = load_function(chosen.function, key="algorithm.policy_loss"), chosen.parameters
        case name:
            function = POLICY_LOSSES[name]

    def token_losses(logprobs: Tensor, old_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        assert batch.advantages is not None
        tensors = (logprobs, old_logprobs, batch.advantages, batch.loss_mask, batch.cu_seqlens)
        selected = () if batch.selected is None else (batch.selected,)
        returned = function(*tensors, *selected, **parameters)
        if chosen.name == "custom":
            _check_token_losses(returned, logprobs, chosen.function)
        losses, metrics = returned
        return losses, dict(metrics)

    return token_losses


def _check_token_losses(returned: Any, logprobs: Tensor, function: str) -> None:
    """Raises TrainingError unless a function of the user's own returned losses [T] with a graph, and metrics."""
    kinds = [type(part).__name__ for part in returned] if isinstance(returned, tuple) else []
    is_pair = len(kinds) == 2 and isinstance(returned[0], Tensor) and isinstance(returned[1], Mapping)
    if not is_pair:
        given = f"a tuple of {', '.join(kinds)}" if kinds else f"a {type(returned).__name__}"
    elif returned[0].shape != logprobs.shape:
        given = f"losses of shape {list(returned[0].shape)}"
    elif logprobs.requires_grad and not returned[0].requires_grad:
        given = "losses without a graph back to logprobs"
    else:
        return
    raise TrainingError(
        f"algorithm.policy_loss={function} returned {given}, expected (losses of shape {list(logprobs.shape)}, one for "
        "each token, and a dict of metrics)"
    )


def _token_mean(losses: Tensor, batch: TokenBatch, denominators: Denominators) -> Tensor:
    return aggregate(
        losses,
        loss_mask=batch.loss_mask,
        cu_seqlens=batch.cu_seqlens,
        denominators=denominators,
        mode="token-mean",
        divisor=None,
    )
