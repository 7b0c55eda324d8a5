"""Binds the pure functions of `algorithms` to a config, as the losses that the engine calls per micro-batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter
from torch import Tensor

from shardwise.algorithms import (
    Aggregation,
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
    Config,
    CriticConfig,
    Custom,
    CustomPreference,
    DistillationConfig,
    JensenShannon,
    Kto,
    PreferenceLoss,
    RewardModelLoss,
    SeqMeanTokenSumNorm,
)
from shardwise.engine import Divergence, DivergenceKind, LossFn, VocabularyTerms
from shardwise.recipes.custom import EXTRAS, CustomFunction
from shardwise.types import Denominators, Metrics, TokenBatch, TokenOutputs

PolicyLossFn = Callable[..., tuple[Tensor, Metrics]]
PairLossFn = Callable[..., tuple[Tensor, Metrics]]

POLICY_LOSSES: Mapping[str, PolicyLossFn] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "reinforce": reinforce,
    "gpg": reinforce,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "topr": topr,
    "kimi": kimi,
}
"""(logprobs, old_logprobs, advantages, loss_mask, cu_seqlens, parameters by keyword) -> losses per token, metrics."""

PREFERENCE_LOSSES: Mapping[str, PairLossFn] = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo}
"""(sums [P, 2], ref_sums [P, 2], lengths [P, 2], parameters by keyword) -> losses of pairs [P], metrics."""

LossKind = Literal["sft", "policy", "value", "preference", "reward_model", "distillation"]

_ANY_PREFERENCE: TypeAdapter[PreferenceLoss] = TypeAdapter(PreferenceLoss)
_ANY_REWARD_MODEL: TypeAdapter[RewardModelLoss] = TypeAdapter(RewardModelLoss)


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss that an engine trains with, and what it needs of a forward pass."""

    function: LossFn
    with_logprobs: bool = True
    with_entropy: bool = False
    """Whether it needs the entropy. Logprobs and entropy each cost a pass over the logits."""
    divergence: Divergence | None = None
    """The divergence from its teacher, if it learns from one."""


class LossSource(BaseModel):
    """What a loss is made from, as plain data that is sent to ranks and kept in bundles of skipped steps."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    kind: LossKind = "sft"
    config: str = ""
    """JSON of the config of its kind; sft has none."""
    numbers: dict[str, float] = {}
    """The numbers that change during a run: kl_coef of policy, kl of preference."""

    @classmethod
    def of(cls, kind: LossKind, config: Config, **numbers: float) -> Self:
        """Describes the loss that a config chooses."""
        return cls(kind=kind, config=config.model_dump_json(), numbers=numbers)

    def make(self) -> Loss:
        """Makes the loss. Raises ConfigError: a function of the user's own cannot be imported."""
        config, numbers = self.config, self.numbers
        match self.kind:
            case "sft":
                return SFT_LOSS
            case "policy":
                return Loss(policy_loss(AlgorithmConfig.model_validate_json(config), **numbers), with_entropy=True)
            case "value":
                return Loss(value_loss(CriticConfig.model_validate_json(config)))
            case "preference":
                return Loss(preference_loss(_ANY_PREFERENCE.validate_json(config), **numbers))
            case "reward_model":
                return Loss(reward_model_loss(_ANY_REWARD_MODEL.validate_json(config)))
            case "distillation":
                return _distillation(DistillationConfig.model_validate_json(config))


def sft_loss(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
    """Returns the cross-entropy, token-mean over the whole step."""
    assert outputs.logprobs is not None
    losses = cross_entropy(outputs.logprobs, batch.loss_mask)
    return _aggregate(losses, batch, denominators, mode="token-mean"), {}


SFT_LOSS = Loss(sft_loss)


def _distillation(config: DistillationConfig) -> Loss:
    chosen = config.divergence
    kind: DivergenceKind | VocabularyTerms
    kind = _vocabulary_terms(chosen) if isinstance(chosen, Custom) else chosen.name
    beta = {"beta": chosen.beta} if isinstance(chosen, JensenShannon) else {}
    return Loss(
        distill_loss(cross_entropy_coef=config.cross_entropy_coef),
        with_logprobs=config.cross_entropy_coef > 0,
        divergence=Divergence(kind=kind, temperature=config.temperature, **beta),
    )


def _vocabulary_terms(chosen: Custom) -> VocabularyTerms:
    own = CustomFunction.load(chosen, key="distillation.divergence")

    def terms(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        return own.tensor(
            own(student_logprobs, teacher_logprobs),
            student_logprobs.shape,
            meaning="one term for each token and word",
            graph_of=student_logprobs,
        )

    return terms


def distill_loss(*, cross_entropy_coef: float = 0.0) -> LossFn:
    """Makes the loss: divergence from a teacher, token-mean over the whole step, plus `cross_entropy_coef` times the
    cross-entropy of the data's tokens. Outputs need logprobs only if the coefficient is not 0."""

    def loss_fn(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        assert outputs.divergence is not None
        losses = outputs.divergence
        metrics = {"train/divergence": trained_mean(losses, batch.loss_mask)}
        if cross_entropy_coef:
            assert outputs.logprobs is not None
            data_losses = cross_entropy(outputs.logprobs, batch.loss_mask)
            metrics["train/cross_entropy"] = trained_mean(data_losses, batch.loss_mask)
            losses = losses + cross_entropy_coef * data_losses
        return _aggregate(losses, batch, denominators, mode="token-mean"), metrics

    return loss_fn


def policy_loss(config: AlgorithmConfig, *, kl_coef: float) -> LossFn:
    """Makes the policy loss of reinforcement learning, with the KL term at its present weight if algorithm.kl_in puts
    it into the loss."""
    token_losses_of, estimate, aggregated = _policy_losses(config), kl_estimate(config), _aggregation(config)

    def loss_fn(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        assert outputs.logprobs is not None
        assert outputs.entropy is not None
        assert batch.rollout_logprobs is not None
        # With one optimizer step per rollout batch the policy is the one that sampled: the ratio is 1, not a constant.
        old_logprobs = outputs.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        losses, metrics = token_losses_of(outputs.logprobs, old_logprobs, batch)
        if batch.importance_weights is not None:
            losses = losses * batch.importance_weights
        if not config.needs_old_logprobs:  # otherwise they were compared before the first optimizer step
            metrics |= mismatch_metrics(outputs.logprobs.detach(), batch.rollout_logprobs, batch.loss_mask)
        metrics["policy/entropy"] = trained_mean(outputs.entropy, batch.loss_mask)
        if batch.ref_logprobs is not None:
            kl = estimate(outputs.logprobs, batch.ref_logprobs)
            metrics["policy/ref_kl"] = trained_mean(kl, batch.loss_mask)
            if config.kl_in == "loss":
                losses = losses + kl_coef * torch.where(batch.loss_mask, kl, 0.0)
        return aggregated(losses, batch, denominators), metrics

    return loss_fn


def kl_estimate(config: AlgorithmConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns (logprobs [T], ref_logprobs [T]) -> the estimated KL divergence of each token, [T], nats."""
    chosen = config.kl_estimator
    if not isinstance(chosen, Custom):
        return partial(kl_divergence, estimator=chosen.name)
    own = CustomFunction.load(chosen, key="algorithm.kl_estimator")

    def estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        graph_of = logprobs if config.kl_in == "loss" else None
        meaning = "one estimate for each token"
        return own.tensor(own(logprobs, ref_logprobs), logprobs.shape, meaning=meaning, graph_of=graph_of)

    return estimate


def _aggregation(config: AlgorithmConfig) -> Callable[[Tensor, TokenBatch, Denominators], Tensor]:
    """Returns (losses [T], batch, denominators) -> this micro-batch's part of the loss of the step."""
    chosen = config.aggregation
    if not isinstance(chosen, Custom):
        divisor = chosen.divisor if isinstance(chosen, SeqMeanTokenSumNorm) else None
        return partial(_aggregate, mode=chosen.name, divisor=divisor)
    own = CustomFunction.load(chosen, key="algorithm.aggregation")

    def aggregated(losses: Tensor, batch: TokenBatch, denominators: Denominators) -> Tensor:
        losses = torch.where(batch.loss_mask, losses, 0.0)
        part = own(losses, batch.loss_mask, batch.cu_seqlens, denominators)
        return own.tensor(part, torch.Size(), meaning="this micro-batch's part of a sum over the step", graph_of=losses)

    return aggregated


def value_loss(config: CriticConfig) -> LossFn:
    """Makes the loss of the critic's values, token-mean over the whole step."""
    token_losses_of = _value_losses(config)

    def loss_fn(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        assert outputs.values is not None
        assert batch.values is not None
        assert batch.returns is not None
        losses, metrics = token_losses_of(outputs.values, batch.values, batch.returns, batch.loss_mask)
        return _aggregate(losses, batch, denominators, mode="token-mean"), metrics

    return loss_fn


def _value_losses(config: CriticConfig) -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Metrics]]:
    """Returns (values [T], old_values [T], returns [T], loss_mask [T]) -> losses [T] and metrics."""
    chosen = config.value_loss
    if not isinstance(chosen, Custom):
        return partial(clipped_value_loss, **chosen.arguments())
    own = CustomFunction.load(chosen, key="critic.value_loss")

    def token_losses(values: Tensor, *others: Tensor) -> tuple[Tensor, Metrics]:
        return own.losses(own(values, *others), like=values, each="token")

    return token_losses


def preference_loss(config: PreferenceLoss, *, kl: float) -> LossFn:
    """Makes the mean loss of a step's pairs, or of its answers if they are labeled."""
    losses_of = preference_losses(config, kl=kl)
    size = 1 if isinstance(config, Kto) or (isinstance(config, CustomPreference) and not config.is_paired) else 2

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
    """Returns (sums, ref_sums, lengths, rewards of sequences [S]) -> losses of pairs [S / 2] or labeled sequences
    [S]."""
    function: Callable[..., tuple[Tensor, Metrics]]
    match config:
        case Kto():
            return lambda sums, ref_sums, _, rewards: kto(sums, ref_sums, rewards > 0, kl, **config.arguments())
        case CustomPreference(is_paired=False):
            function = _custom_losses(config, each="answer")
            return lambda sums, ref_sums, lengths, rewards: function(sums, ref_sums, lengths, rewards > 0, kl)
        case CustomPreference():
            function = _custom_losses(config, each="pair")
        case _:
            function = partial(PREFERENCE_LOSSES[config.name], **config.arguments())
    return lambda sums, ref_sums, lengths, _: function(sums.view(-1, 2), ref_sums.view(-1, 2), lengths.view(-1, 2))


def reward_model_loss(config: RewardModelLoss) -> LossFn:
    """Makes the mean loss of a step's pairs, with their margins."""
    losses_of = reward_model_losses(config)

    def loss_fn(outputs: TokenOutputs, batch: TokenBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        assert outputs.values is not None
        assert batch.rewards is not None
        num_sequences = len(batch.sample_index)  # 0 in a batch of one masked token
        scores = sequence_sums(outputs.values, batch.cu_seqlens)[:num_sequences]
        losses, metrics = losses_of(scores, batch.rewards[:num_sequences])
        return losses.sum() * 2 / max(denominators.num_sequences, 1), metrics

    return loss_fn


def reward_model_losses(config: RewardModelLoss) -> Callable[[Tensor, Tensor], tuple[Tensor, Metrics]]:
    """Returns (scores, rewards of sequences [S]) -> losses of pairs [S / 2]. The margin of a pair is the difference of
    its rewards."""
    function: PairLossFn
    if isinstance(config, Custom):
        function = _custom_losses(config, each="pair")
    else:
        function = partial(bradley_terry, **config.arguments())

    def pair_losses(scores: Tensor, rewards: Tensor) -> tuple[Tensor, Metrics]:
        rewards = rewards.view(-1, 2)
        return function(scores.view(-1, 2), rewards[:, 0] - rewards[:, 1])

    return pair_losses


def _custom_losses(chosen: Custom, *, each: Literal["pair", "answer"]) -> Callable[..., tuple[Tensor, Metrics]]:
    """Makes losses from a function of the user's own. Its first argument carries the gradient: [P, 2] for pairs, [S]
    for answers."""
    own = CustomFunction.load(chosen, key="loss")

    def losses(learned: Tensor, *others: Tensor | float) -> tuple[Tensor, Metrics]:
        like = learned[:, 0] if each == "pair" else learned
        return own.losses(own(learned, *others), like=like, each=each)

    return losses


def _policy_losses(config: AlgorithmConfig) -> Callable[[Tensor, Tensor, TokenBatch], tuple[Tensor, Metrics]]:
    """Returns (logprobs [T], old_logprobs [T], batch) -> losses [T] and metrics, of the chosen function."""
    chosen = config.policy_loss
    if isinstance(chosen, Custom):
        return _custom_policy_losses(chosen)
    function: PolicyLossFn
    parameters: Mapping[str, Any] = chosen.arguments()
    match chosen.name:
        case "clip_cov":
            function, parameters = clip_cov, {"clip_low": chosen.clip_low, "clip_high": chosen.clip_high}
        case "kl_cov":
            function, parameters = kl_cov, {"coef": chosen.coef}
        case name:
            function = POLICY_LOSSES[name]

    def token_losses(logprobs: Tensor, old_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        selected = () if batch.selected is None else (batch.selected,)
        return function(*_policy_tensors(logprobs, old_logprobs, batch), *selected, **parameters)

    return token_losses


def _custom_policy_losses(chosen: Custom) -> Callable[[Tensor, Tensor, TokenBatch], tuple[Tensor, Metrics]]:
    own = CustomFunction.load(chosen, key="algorithm.policy_loss")

    def token_losses(logprobs: Tensor, old_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        there = {name: value for name in EXTRAS[own.key] if (value := getattr(batch, name)) is not None}
        extras = {name: there[name] for name in own.asked(there)}
        return own.losses(own(*_policy_tensors(logprobs, old_logprobs, batch), **extras), like=logprobs, each="token")

    return token_losses


def _policy_tensors(logprobs: Tensor, old_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, ...]:
    """Returns the first arguments of every policy loss."""
    assert batch.advantages is not None
    return logprobs, old_logprobs, batch.advantages, batch.loss_mask, batch.cu_seqlens


def _aggregate(
    losses: Tensor, batch: TokenBatch, denominators: Denominators, *, mode: Aggregation, divisor: float | None = None
) -> Tensor:
    return aggregate(
        losses,
        loss_mask=batch.loss_mask,
        cu_seqlens=batch.cu_seqlens,
        denominators=denominators,
        mode=mode,
        divisor=divisor,
    )
