"""Binds the advantage estimators of `algorithms` to a config, and to the samples of a step."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.algorithms import (
    explained_variance,
    gae,
    gdpo,
    gigpo,
    gpg,
    group_metrics,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    outcome_token_rewards,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    reverse_kl_advantages,
    rloo,
    turn_metrics,
)
from shardwise.config import AlgorithmConfig, Custom, TrainingError
from shardwise.config.algorithm import GROUP_ADVANTAGES
from shardwise.recipes.custom import EXTRAS, CustomFunction
from shardwise.recipes.losses import kl_estimate
from shardwise.recipes.sample_fields import padded, padded_field, present, with_field
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
    """The samples of a step, and what else their advantages are computed from, in the same order."""

    samples: Sequence[Sample]
    reward_parts: Mapping[str, Sequence[float]]
    """Name of the reward function -> its scores."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Name of the reward function -> its weight."""
    outcome_rewards: Sequence[float] | None = None
    """Reward of each sample before penalties, for gpg and maxrl."""
    greedy_rewards: Sequence[float] | None = None
    """Reward of the greedy completion of each sample's prompt, for remax."""
    teacher_logprobs: Sequence[Tensor] | None = None
    """[L] for each sample, for distillation."""


def with_advantages(scored: Scored, config: AlgorithmConfig, *, kl_coef: float) -> tuple[list[Sample], Metrics]:
    """Adds advantages, and returns if there is a critic. A KL term in the reward is first subtracted from it token by
    token."""
    samples = scored.samples
    loss_mask = padded_field(samples, "loss_mask")
    token_rewards = outcome_token_rewards(torch.tensor([sample.reward for sample in samples]), loss_mask)
    group_ids = torch.tensor([sample.group for sample in samples])
    chosen = config.advantage
    metrics: Metrics = {
        "advantage/num_samples_without_tokens": MetricValue.sum(len(samples) - int(loss_mask.any(1).sum()))
    }
    if chosen.name in GROUP_ADVANTAGES:
        metrics |= group_metrics(_compared_rewards(scored, config), loss_mask, group_ids)
    if config.kl_in == "reward" and config.kl_coef > 0:
        reference = padded_field(samples, "ref_logprobs")
        kl = kl_estimate(config)(_policy_logprobs(samples).flatten(), reference.flatten())
        token_rewards = token_rewards - kl_coef * kl.view_as(token_rewards)
    returns = None
    match chosen.name:
        case "gae":
            values = padded_field(samples, "values")
            advantages, returns = gae(token_rewards, loss_mask, values, **chosen.arguments())
        case "gdpo":
            parts = {name: torch.tensor(list(scores)) for name, scores in scored.reward_parts.items()}
            advantages = torch.zeros_like(token_rewards)
            if parts:  # else every call of the rewards has failed
                advantages = gdpo(token_rewards, loss_mask, group_ids, parts, weights=_weights_of_parts(scored))
        case "remax":
            assert scored.greedy_rewards is not None
            advantages = remax(token_rewards, loss_mask, group_ids, torch.tensor(list(scored.greedy_rewards)))
        case "gpg" | "maxrl":
            assert scored.outcome_rewards is not None
            estimator = gpg if chosen.name == "gpg" else maxrl
            advantages = estimator(token_rewards, loss_mask, group_ids, torch.tensor(list(scored.outcome_rewards)))
        case "gigpo":
            turns, states = turns_and_states(samples)
            advantages = gigpo(token_rewards, loss_mask, group_ids, turns, states, **chosen.arguments())
            metrics |= turn_metrics(loss_mask, turns, states)
        case "distill":
            assert scored.teacher_logprobs is not None
            advantages = reverse_kl_advantages(_policy_logprobs(samples), padded(scored.teacher_logprobs), loss_mask)
            metrics["policy/teacher_kl"] = MetricValue.mean(float(-advantages.sum()), int(loss_mask.sum()))
        case "custom":
            advantages, returns = _custom_advantages(chosen, scored, token_rewards, loss_mask, group_ids)
        case name:
            advantages = ADVANTAGES[name](token_rewards, loss_mask, group_ids, **chosen.arguments())
    _require_finite(advantages, samples, config)
    learned = with_field(samples, "advantages", advantages)
    if returns is None:
        return learned, metrics
    _require_finite(returns, samples, config)
    values = padded_field(samples, "values")
    return with_field(learned, "returns", returns), metrics | explained_variance(values, returns, loss_mask)


def _policy_logprobs(samples: Sequence[Sample]) -> Tensor:
    """Returns the logprobs of the policy as the step begins, [N, L]. The rollout's are those of the policy that
    sampled, which max_staleness lets be an older one."""
    return padded([present(s.rollout_logprobs if s.old_logprobs is None else s.old_logprobs) for s in samples])


def _compared_rewards(scored: Scored, config: AlgorithmConfig) -> Tensor:
    """Returns the rewards that are compared within groups, [N, K]; gdpo compares each function's separately."""
    if config.advantage.name != "gdpo":
        return torch.tensor([[sample.reward] for sample in scored.samples])
    weights = _weights_of_parts(scored)
    rewards = [torch.tensor(list(scores)) for name, scores in scored.reward_parts.items() if weights[name]]
    return torch.stack(rewards, dim=1) if rewards else torch.zeros(len(scored.samples), 1)


def _weights_of_parts(scored: Scored) -> dict[str, float]:
    """Returns the weight of each part; 1 for those that a custom manager returns, which have none."""
    return {name: scored.reward_weights.get(name, 1.0) for name in scored.reward_parts}


def turns_and_states(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Numbers the turns of completions, and the states that they answered: the environment's tokens right before a
    turn, which may be none, or the prompt.

    Returns:
        turns [N, L] int64 of trained tokens and states [N, K] int64, as `gigpo` takes them.
    """
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    turns, states = [], []
    for sample in samples:
        assert sample.turn_starts is not None  # a rollout's
        begins = sample.turn_starts or [len(sample.token_ids)]  # an agent may fail before it takes a turn
        places = torch.arange(len(sample.token_ids))
        turns.append((torch.searchsorted(torch.tensor(begins), places, right=True) - 1).clamp(min=0))
        trained = sample.loss_mask.nonzero().flatten().tolist()  # all that was sampled, or nothing
        num_before = [bisect_left(trained, begin) for begin in begins]
        ends = [trained[number - 1] + 1 if number else 0 for number in num_before]  # ends of the turns before
        answered = [tuple(sample.token_ids[end:begin].tolist()) for end, begin in zip(ends, begins, strict=True)]
        keys = [(sample.group, state) for state in answered]
        states.append(torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys]))
    return padded(turns), padded(states)


def _custom_advantages(
    chosen: Custom, scored: Scored, token_rewards: Tensor, loss_mask: Tensor, group_ids: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Computes advantages by a function of the user's own, which also gets the fields of samples that its signature
    names. With a critic also gives returns: the function's own if it returns a pair, else advantages + values."""
    own = CustomFunction.load(chosen, key="algorithm.advantage")
    samples = scored.samples
    there: dict[str, Any] = {"reward_parts": {name: torch.tensor(list(s)) for name, s in scored.reward_parts.items()}}
    for name in EXTRAS[own.key]:
        if name not in there and getattr(samples[0], name) is not None:
            there[name] = padded_field(samples, name)
    returned = own(token_rewards, loss_mask, group_ids, **{name: there[name] for name in own.asked(there)})
    meaning = "one advantage for each token"
    if "values" not in there:
        return own.tensor(returned, loss_mask.shape, meaning=meaning).float(), None
    if isinstance(returned, tuple) and len(returned) == 2:
        advantages, returns = (
            own.tensor(part, loss_mask.shape, meaning=f"one {each} for each token").float()
            for part, each in zip(returned, ("advantage", "return"), strict=True)
        )
    else:
        meaning = f"{meaning}, or a pair of advantages and returns"
        advantages = own.tensor(returned, loss_mask.shape, meaning=meaning).float()
        returns = advantages + there["values"]
    return advantages, torch.where(loss_mask, returns, 0.0)


def _require_finite(advantages: Tensor, samples: Sequence[Sample], config: AlgorithmConfig) -> None:
    """Raises TrainingError if the advantage of a trained token is not finite: an infinite logprob or reward spreads
    over its group."""
    for sample, row in zip(samples, advantages, strict=True):
        wrong = ~row[: len(sample.token_ids)].isfinite() & sample.loss_mask
        if wrong.any():
            place = int(wrong.int().argmax())
            names = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values")
            there = {name: values[place] for name in names if (values := getattr(sample, name)) is not None}
            shown = ", ".join(f"{name} {float(value):g}" for name, value in there.items())
            cause = "a reward, logprob or value of its group is not finite"
            chosen: str = config.advantage.name
            if isinstance(config.advantage, Custom):
                chosen, cause = config.advantage.function, f"the function divides by 0 there, say, or {cause}"
            raise TrainingError(
                f"algorithm.advantage={chosen} gave {float(row[place])} for row {sample.uid}, token {place} (reward "
                f"{sample.reward:g}, {shown}); {cause}"
            )
