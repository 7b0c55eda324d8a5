"""Binds the advantage estimators of `algorithms` to a config, and to the samples of a step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.algorithms import (
    clip_cov_selection,
    correction_metrics,
    explained_variance,
    gae,
    gdpo,
    gpg,
    group_metrics,
    grpo,
    grpo_passk,
    kl_cov_selection,
    kl_divergence,
    maxrl,
    mismatch_metrics,
    opo,
    outcome_token_rewards,
    overlong_penalty,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    reverse_kl_advantages,
    rloo,
    rollout_rejection,
    rollout_weights,
)
from shardwise.config import AlgorithmConfig, TrainingError
from shardwise.config.algorithm import GROUP_ADVANTAGES
from shardwise.rewards import load_function
from shardwise.types import Metrics, MetricValue, Sample

AdvantageFn = Callable[..., Tensor]

ADVANTAGES: Mapping[str, AdvantageFn] = {
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
}
"""(token_rewards [N, L], loss_mask [N, L], group_ids [N], parameters by keyword) -> advantages [N, L]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The samples of a step and what else their advantages are made of, in the same order."""

    samples: Sequence[Sample]
    reward_parts: Mapping[str, Sequence[float]]
    """Of every reward function its scores."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Of every reward function its weight."""
    outcome_rewards: Sequence[float] | None = None
    """Of every sample its reward before penalties, for gpg and maxrl."""
    greedy_rewards: Sequence[float] | None = None
    """Of every sample the reward of its prompt's greedy completion, for remax."""
    teacher_logprobs: Sequence[Tensor] | None = None
    """[L] of every sample, for distillation."""


def with_advantages(scored: Scored, config: AlgorithmConfig, *, kl_coef: float) -> tuple[list[Sample], Metrics]:
    """Adds advantages, and returns where there is a critic. A KL term in the reward is subtracted token by token before
    them."""
    samples = scored.samples
    loss_mask = padded([sample.loss_mask for sample in samples])
    token_rewards = outcome_token_rewards(torch.tensor([sample.reward for sample in samples]), loss_mask)
    group_ids = torch.tensor([sample.group for sample in samples])
    chosen = config.advantage
    metrics: Metrics = {}
    if chosen.name in GROUP_ADVANTAGES and chosen.name != "gdpo":  # gdpo compares every function's rewards apart
        metrics = group_metrics(token_rewards, loss_mask, group_ids)
    # The rollout's logprobs are the policy's own: its weights were synced before it sampled. The trainer's are better.
    policy_logprobs = padded(
        [present(s.rollout_logprobs if s.old_logprobs is None else s.old_logprobs) for s in samples]
    )
    if config.kl_in == "reward" and config.kl_coef > 0:
        reference = padded([present(sample.ref_logprobs) for sample in samples])
        kl = kl_divergence(policy_logprobs, reference, estimator=config.kl_estimator)
        token_rewards = token_rewards - kl_coef * kl
    returns = None
    match chosen.name:
        case "gae":
            values = padded([present(sample.values) for sample in samples])
            advantages, returns = gae(token_rewards, loss_mask, values, **chosen.arguments())
            metrics |= explained_variance(values, returns, loss_mask)
        case "gdpo":
            parts = {name: torch.tensor(list(scores)) for name, scores in scored.reward_parts.items()}
            weights = {name: scored.reward_weights.get(name, 1.0) for name in parts}  # a manager's parts have none
            advantages = gdpo(token_rewards, loss_mask, group_ids, parts, weights=weights)
        case "remax":
            assert scored.greedy_rewards is not None
            advantages = remax(token_rewards, loss_mask, group_ids, torch.tensor(list(scored.greedy_rewards)))
        case "gpg" | "maxrl":
            assert scored.outcome_rewards is not None
            estimator = gpg if chosen.name == "gpg" else maxrl
            advantages = estimator(token_rewards, loss_mask, group_ids, torch.tensor(list(scored.outcome_rewards)))
        case "distill":
            assert scored.teacher_logprobs is not None
            advantages = reverse_kl_advantages(policy_logprobs, padded(scored.teacher_logprobs), loss_mask)
            metrics["policy/teacher_kl"] = MetricValue.mean(float(-advantages.sum()), int(loss_mask.sum()))
        case "custom":
            function = load_function(chosen.function, key="algorithm.advantage")
            advantages = function(token_rewards, loss_mask, group_ids, **chosen.parameters)
            _check_shape(advantages, loss_mask, chosen.function)
        case name:
            advantages = ADVANTAGES[name](token_rewards, loss_mask, group_ids, **chosen.arguments())
    _require_finite(advantages, samples, config)
    samples = _with_rows(samples, "advantages", advantages)
    return (samples if returns is None else _with_rows(samples, "returns", returns)), metrics


def with_overlong_penalty(samples: Sequence[Sample], config: AlgorithmConfig, *, max_tokens: int) -> list[Sample]:
    """Subtracts DAPO's soft punishment from the rewards of completions that come close to `max_tokens`."""
    if config.overlong_penalty is None:
        return list(samples)
    lengths = torch.tensor([int(sample.loss_mask.sum()) for sample in samples])
    penalties = overlong_penalty(
        lengths,
        max_tokens=max_tokens,
        buffer_tokens=config.overlong_penalty.buffer_tokens,
        factor=config.overlong_penalty.factor,
    )
    return [replace(s, reward=s.reward + p) for s, p in zip(samples, penalties.tolist(), strict=True)]


def with_rollout_correction(samples: Sequence[Sample], config: AlgorithmConfig) -> tuple[list[Sample], Metrics]:
    """Adds importance weights, and takes rejected tokens out of the loss and so out of its denominators.

    Returns:
        The samples, and how far trainer and rollout were apart before, where the trainer's logprobs are there.
    """
    correction = config.rollout_correction
    if not config.needs_old_logprobs:
        return list(samples), {}
    old, rollout, loss_mask = (
        padded([present(getattr(sample, name)) for sample in samples])
        for name in ("old_logprobs", "rollout_logprobs", "loss_mask")
    )
    apart = mismatch_metrics(old, rollout, loss_mask)
    if not correction.compares:
        return list(samples), apart
    weights, kept = torch.ones_like(old), loss_mask
    if correction.weights is not None:
        weights = rollout_weights(
            old,
            rollout,
            loss_mask,
            level=correction.weights.level,
            mode=correction.weights.mode,
            low=correction.weights.low,
            high=correction.weights.high,
        )
    if correction.rejection is not None:
        kept = rollout_rejection(
            old,
            rollout,
            loss_mask,
            level=correction.rejection.level,
            estimator=correction.rejection.estimator,
            low=correction.rejection.low,
            high=correction.rejection.high,
        )
    corrected = _with_rows(_with_rows(samples, "weights", weights), "loss_mask", kept)
    high = math.inf if correction.weights is None else correction.weights.high
    return corrected, apart | correction_metrics(weights, kept, loss_mask, high=high)


def with_selection(samples: Sequence[Sample], config: AlgorithmConfig, *, seed: int) -> list[Sample]:
    """Marks the tokens of an optimizer step that clip_cov and kl_cov treat apart from the others."""
    chosen = config.policy_loss
    if chosen.name not in ("clip_cov", "kl_cov"):
        return list(samples)
    old, advantages, loss_mask = (
        padded([present(getattr(sample, name)) for sample in samples])
        for name in ("old_logprobs", "advantages", "loss_mask")
    )
    match chosen.name:
        case "clip_cov":
            selected = clip_cov_selection(
                old,
                advantages,
                loss_mask,
                fraction=chosen.fraction,
                cov_low=chosen.cov_low,
                cov_high=chosen.cov_high,
                seed=seed,
            )
        case _:
            selected = kl_cov_selection(old, advantages, loss_mask, fraction=chosen.fraction)
    return _with_rows(samples, "selected", selected)


def padded(rows: Sequence[Tensor]) -> Tensor:
    """[N, L], 0 and False behind the end of a row."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def present(values: Tensor | None) -> Tensor:
    """What an earlier phase of the step has put there."""
    assert values is not None
    return values


def _with_rows(samples: Sequence[Sample], name: str, values: Tensor) -> list[Sample]:
    rows: list[Any] = list(zip(samples, values, strict=True))
    return [replace(sample, **{name: row[: len(sample.token_ids)]}) for sample, row in rows]


def _require_finite(advantages: Tensor, samples: Sequence[Sample], config: AlgorithmConfig) -> None:
    """Raises TrainingError where a trained token has none: an infinite logprob or reward spreads over its group."""
    for sample, row in zip(samples, advantages, strict=True):
        wrong = ~row[: len(sample.token_ids)].isfinite() & sample.loss_mask
        if wrong.any():
            place = int(wrong.int().argmax())
            names = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values")
            there = {name: values[place] for name in names if (values := getattr(sample, name)) is not None}
            shown = ", ".join(f"{name} {float(value):g}" for name, value in there.items())
            raise TrainingError(
                f"algorithm.advantage={config.advantage.name} gave {float(row[place])} for row {sample.uid}, token "
                f"{place} (reward {sample.reward:g}, {shown}); a reward, logprob or value of its group is not finite"
            )


def _check_shape(advantages: object, loss_mask: Tensor, function: str) -> None:
    """Raises TrainingError unless a function of the user's own returned advantages of the right shape."""
    given = f"algorithm.advantage={function} returned"
    if not isinstance(advantages, Tensor):
        raise TrainingError(
            f"{given} a {type(advantages).__name__}, expected a tensor of shape {list(loss_mask.shape)}"
        )
    if advantages.shape != loss_mask.shape:
        raise TrainingError(
            f"{given} a tensor of shape {list(advantages.shape)}, expected {list(loss_mask.shape)}: one number for "
            "each token of token_rewards"
        )
