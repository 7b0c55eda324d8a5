"""Advantages from the outcomes of whole groups of samples, computed on the controller.

Shape letters: N samples of a step, L width of the padded arrays. Samples of one group may lie anywhere in N.
The outcome R of a sample is the sum of its rewards on trained tokens; every trained token gets the same advantage.

A sample without a trained token has no token that could carry its reward. It gets advantage 0 and is left out of its
group's statistics: a group of four in which one sample has no trained token is a group of three.
A group of one has no baseline: its advantage is 0 in every estimator that compares the samples of a group.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from shardwise.algorithms.groups import (
    group_deviations,
    group_maxima,
    group_means,
    group_sums,
    has_baseline,
    sample_outcomes,
    spread_over_tokens,
)
from shardwise.algorithms.masked import whitened
from shardwise.types import Metrics, MetricValue

STD_EPSILON = 1e-6


def outcome_token_rewards(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Puts the reward of each sample on its last trained token, never on a masked one behind it.

    Args:
        rewards: [N] float32.
        loss_mask: [N, L] bool, True = trained.
    Returns:
        [N, L] float32, 0 elsewhere; a row without a trained token is all 0.
    """
    placed = torch.zeros(loss_mask.shape, dtype=rewards.dtype)
    rows = loss_mask.any(1).nonzero().flatten()
    last = loss_mask.shape[1] - 1 - loss_mask[rows].flip(1).byte().argmax(1)  # argmax: the first of equals
    placed[rows, last] = rewards[rows]
    return placed


def grpo(token_rewards: Tensor, loss_mask: Tensor, group_ids: Tensor, *, scale: Literal["std", "none"]) -> Tensor:
    """Group-relative advantages: (R - mean) / (std + 1e-6) over the group.

    Args:
        token_rewards: [N, L] float32; rewards where not trained are ignored.
        loss_mask: [N, L] bool, True = trained.
        group_ids: [N] int64, equal for the samples of one prompt.
        scale: "std" divides by the unbiased standard deviation; "none" does not divide (Dr.GRPO).
    Returns:
        [N, L] float32, the sample's advantage on every trained token, 0 elsewhere.
    Raises:
        ValueError: an unknown scale.
    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2; without the division: Liu et al. 2025 (Dr.GRPO).
        Differs: a group of one gets 0, and samples without a trained token do not count.
    """
    return spread_over_tokens(
        scaled_deviations(*sample_outcomes(token_rewards, loss_mask), group_ids, scale), loss_mask
    )


def grpo_passk(token_rewards: Tensor, loss_mask: Tensor, group_ids: Tensor, *, scale: Literal["std", "none"]) -> Tensor:
    """Only the best sample of a group learns: (max - second max) / (std + 1e-6) for it, 0 for the others.

    That is what the group's best reward gains by having this sample, so the sum over a group estimates the gradient of
    the best of k. If two samples share the maximum, neither gains anything.

    Args:
        token_rewards: [N, L] float32; rewards where not trained are ignored.
        loss_mask: [N, L] bool, True = trained.
        group_ids: [N] int64, equal for the samples of one prompt.
        scale: "std" divides by the unbiased standard deviation of the group; "none" does not divide.
    Returns:
        [N, L] float32, 0 where not trained.
    Raises:
        ValueError: an unknown scale.
    Source: Tang et al. 2025, "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning".
        Differs: a group of one gets 0, and samples without a trained token do not count.
    """
    outcomes, counted = sample_outcomes(token_rewards, loss_mask)
    reachable = torch.where(counted, outcomes, -torch.inf)
    best = counted & (reachable == group_maxima(reachable, group_ids))
    second = group_maxima(reachable.masked_fill(best, -torch.inf), group_ids)
    alone = group_sums(best.double(), group_ids) == 1
    gains = torch.where(best & alone & has_baseline(counted, group_ids), outcomes - second, 0.0)
    _, std = group_deviations(outcomes, counted, group_ids)
    return spread_over_tokens(_scaled(gains, std, scale), loss_mask)


def gdpo(
    token_rewards: Tensor,
    loss_mask: Tensor,
    group_ids: Tensor,
    reward_parts: Mapping[str, Tensor],
    *,
    weights: Mapping[str, float],
) -> Tensor:
    """Compares every part of the reward within the group separately, so that a part with large values cannot hide
    another: sum over parts k of weight_k (R_k - mean_k) / (std_k + 1e-6), then whitened over the step's tokens.

    Args:
        token_rewards: [N, L] float32, not read: the parts take its place.
        loss_mask: [N, L] bool, True = trained.
        group_ids: [N] int64, equal for the samples of one prompt.
        reward_parts: name -> [N] float32; at least one part.
        weights: name of a part -> its weight; a part that is not named has weight 1.
    Returns:
        [N, L] float32, 0 where not trained.
    Raises:
        ValueError: no parts, or a weight for a part that does not exist.
    Source: Liu et al. 2026 (GDPO). Differs: a group of one gets 0 and is left out of the whitening, which would give it
        the step's mean with the opposite sign; samples without a trained token do not count.
    """
    if not reward_parts:
        raise ValueError("gdpo compares the parts of the reward, but the reward function returned only a score")
    if unknown := weights.keys() - reward_parts.keys():
        known = ", ".join(reward_parts)
        raise ValueError(f"weights for {', '.join(sorted(unknown))}, but the parts of the reward are {known}")
    counted = loss_mask.any(1)
    combined = torch.zeros(len(loss_mask), dtype=torch.float64)
    for name, rewards in reward_parts.items():
        weight = weights.get(name, 1.0)
        deviations, std = group_deviations(rewards.double(), counted, group_ids)
        combined = combined + weight * _scaled(deviations, std, "std")
    return _whitened_over_tokens(combined, loss_mask, has_baseline(counted, group_ids))


def rloo(token_rewards: Tensor, loss_mask: Tensor, group_ids: Tensor) -> Tensor:
    """Leave-one-out advantages: R minus the mean R of the other samples in the group.

    Args:
        token_rewards: [N, L] float32; rewards where not trained are ignored.
        loss_mask: [N, L] bool, True = trained.
        group_ids: [N] int64, equal for the samples of one prompt.
    Returns:
        [N, L] float32, the sample's advantage on every trained token, 0 elsewhere.
    Source: Kool et al. 2019; Ahmadian et al. 2024 (RLOO).
        Differs: a group of one gets 0, and samples without a trained token do not count.
    """
    outcomes, counted = sample_outcomes(token_rewards, loss_mask)
    num_others = group_sums(counted.double(), group_ids) - 1
    baseline = (group_sums(outcomes, group_ids) - outcomes) / num_others.clamp(min=1)
    return spread_over_tokens(torch.where(num_others > 0, outcomes - baseline, 0.0), loss_mask)


def reinforce_plus_plus_baseline(token_rewards: Tensor, loss_mask: Tensor, group_ids: Tensor) -> Tensor:
    """R minus the mean R of the group, whitened over the trained tokens of the whole step.

    Args:
        token_rewards: [N, L] float32; rewards where not trained are ignored.
        loss_mask: [N, L] bool, True = trained.
        group_ids: [N] int64, equal for the samples of one prompt.
    Returns:
        [N, L] float32, 0 where not trained.
    Source: Hu et al. 2025 (REINFORCE++ with baseline). Differs: a group of one gets 0 and is left out of the whitening,
        which would give it the step's mean with the opposite sign; samples without a trained token do not count.
    """
    outcomes, counted = sample_outcomes(token_rewards, loss_mask)
    deviations, _ = group_deviations(outcomes, counted, group_ids)
    return _whitened_over_tokens(deviations, loss_mask, has_baseline(counted, group_ids))


def remax(token_rewards: Tensor, loss_mask: Tensor, group_ids: Tensor, greedy_rewards: Tensor) -> Tensor:
    """R minus the reward of the greedy completion of the same prompt, which is a baseline for a group of one too.

    Args:
        token_rewards: [N, L] float32; rewards where not trained are ignored.
        loss_mask: [N, L] bool, True = trained.
        group_ids: [N] int64, not read: each sample has its own baseline.
        greedy_rewards: [N] float32, of the greedy completion of the sample's prompt.
    Returns:
        [N, L] float32, 0 where not trained.
    Source: Li et al. 2023 (ReMax). If the rewards include a KL term, the baseline has none, because nothing is trained
        on its tokens.
    """
    outcomes, _ = sample_outcomes(token_rewards, loss_mask)
    return spread_over_tokens(outcomes - greedy_rewards.double(), loss_mask)


def opo(token_rewards: Tensor, loss_mask: Tensor, group_ids: Tensor) -> Tensor:
    """R minus the length-weighted mean R of the group, length being the number of trained tokens: the baseline of least
    variance if every token adds the same to the gradient's norm.

    Args:
        token_rewards: [N, L] float32; rewards where not trained are ignored.
        loss_mask: [N, L] bool, True = trained.
        group_ids: [N] int64, equal for the samples of one prompt.
    Returns:
        [N, L] float32, 0 where not trained.
    Source: Hao et al. 2025 (OPO). Differs: a group of one gets 0.
    """
    outcomes, counted = sample_outcomes(token_rewards, loss_mask)
    lengths = loss_mask.sum(1).double()
    baseline = group_sums(lengths * outcomes, group_ids) / group_sums(lengths, group_ids).clamp(min=1)
    return spread_over_tokens(torch.where(has_baseline(counted, group_ids), outcomes - baseline, 0.0), loss_mask)


def gpg(token_rewards: Tensor, loss_mask: Tensor, group_ids: Tensor, outcome_rewards: Tensor) -> Tensor:
    """(R - mean) alpha, with alpha = number of samples / number of samples with an outcome reward other than 0, over
    the step. Penalties are part of R but not of alpha, since hardly any penalized reward is exactly 0.

    Args:
        token_rewards: [N, L] float32; rewards where not trained are ignored.
        loss_mask: [N, L] bool, True = trained.
        group_ids: [N] int64, equal for the samples of one prompt.
        outcome_rewards: [N] float32, before a KL term and penalties were subtracted.
    Returns:
        [N, L] float32, 0 where not trained.
    Source: Chu et al. 2025 (GPG), which has neither KL term nor penalties. Differs: alpha is that of published
        implementations; the paper divides by the samples of groups whose rewards are not all equal; a group of one gets
        0, and samples without a trained token do not count, neither in the mean nor in alpha.
    """
    outcomes, counted = sample_outcomes(token_rewards, loss_mask)
    deviations, _ = group_deviations(outcomes, counted, group_ids)
    alpha = counted.sum() / (counted & (outcome_rewards != 0)).sum().clamp(min=1)
    return spread_over_tokens(alpha * deviations, loss_mask)


def maxrl(token_rewards: Tensor, loss_mask: Tensor, group_ids: Tensor, outcome_rewards: Tensor) -> Tensor:
    """(R - mean R) / mean outcome reward over the group: prompts that are rarely solved weigh more, as in maximum
    likelihood.

    For outcome rewards of 0 and 1 their mean is the estimated chance of success p, and the gradient is that of log p,
    expanded to as many terms as the group has samples. Penalties are part of R: they are weighted by 1 / p too, but do
    not change p.

    Args:
        token_rewards: [N, L] float32; rewards where not trained are ignored.
        loss_mask: [N, L] bool, True = trained.
        group_ids: [N] int64, equal for the samples of one prompt.
        outcome_rewards: [N] float32, before a KL term and penalties were subtracted; not negative.
    Returns:
        [N, L] float32, 0 where not trained.
    Source: Tajwar et al. 2026 (Maximum Likelihood Reinforcement Learning), which has no penalties. Differs: a group
        whose mean outcome is not positive gets 0 (below 0 the division would reward the worst), and so does a group of
        one.
    """
    outcomes, counted = sample_outcomes(token_rewards, loss_mask)
    deviations, _ = group_deviations(outcomes, counted, group_ids)
    means = group_means(outcome_rewards.double(), counted, group_ids)
    return spread_over_tokens(torch.where(counted & (means > 0), deviations / means, 0.0), loss_mask)


def group_metrics(rewards: Tensor, loss_mask: Tensor, group_ids: Tensor) -> Metrics:
    """Counts the groups that teach nothing; the two counts are disjoint.

    Args:
        rewards: [N, K], what is compared within a group: each sample's reward (K = 1), or the K parts of it.
        loss_mask: [N, L] bool, True = trained.
        group_ids: [N] int64, equal for the samples of one prompt.
    Returns:
        advantage/num_groups_without_baseline: groups in which fewer than two samples have a trained token.
        advantage/num_zero_variance_groups: the other groups whose rewards are all equal.
        advantage/zero_variance_fraction: the share of these among the groups that have a baseline; 1 = nothing learned.
    """
    counted = loss_mask.any(1)
    ids, places = group_ids.unique(return_inverse=True)
    values, places = rewards[counted], places[counted]
    has_baseline = places.bincount(minlength=len(ids)) > 1
    lowest, highest = (
        values.new_zeros(len(ids), values.shape[1]).scatter_reduce(
            0, places[:, None].expand_as(values), values, reduce, include_self=False
        )
        for reduce in ("amin", "amax")
    )
    num_compared, num_equal = int(has_baseline.sum()), int((has_baseline & (lowest == highest).all(1)).sum())
    return {
        "advantage/num_groups_without_baseline": MetricValue.sum(len(ids) - num_compared),
        "advantage/num_zero_variance_groups": MetricValue.sum(num_equal),
        "advantage/zero_variance_fraction": MetricValue.mean(num_equal, num_compared),
    }


def scaled_deviations(outcomes: Tensor, counted: Tensor, group_ids: Tensor, scale: Literal["std", "none"]) -> Tensor:
    """[N] float64: each outcome's deviation from its group's mean, divided by the group's standard deviation if scale
    is "std".

    Args: as in `groups.group_deviations`.
    Raises:
        ValueError: an unknown scale.
    """
    return _scaled(*group_deviations(outcomes, counted, group_ids), scale)


def _scaled(values: Tensor, std: Tensor, scale: Literal["std", "none"]) -> Tensor:
    match scale:
        case "std":
            return values / (std + STD_EPSILON)
        case "none":
            return values
        case _:
            raise ValueError(f"scale={scale} is not known; use std or none")


def _whitened_over_tokens(advantages: Tensor, loss_mask: Tensor, compared: Tensor) -> Tensor:
    """[N] float64 -> [N, L] float32, whitened over the trained tokens of compared samples; 0 elsewhere."""
    return whitened(advantages[:, None].expand(loss_mask.shape), loss_mask & compared[:, None]).float()
