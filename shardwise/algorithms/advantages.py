"""Advantages of whole groups of samples, on the controller.

Shape letters: N samples of a step, L width of the padded arrays. Samples of one group may lie anywhere in N.

A sample without a trained token has no token that could carry its reward. It gets advantage 0 and is left out of its
group's statistics: a group of four in which one sample has no trained token is a group of three.
A group of one has no baseline: its advantage is 0 in every estimator.
"""

from typing import Literal

import torch
from torch import Tensor

from shardwise.types import Metrics, MetricValue


def outcome_token_rewards(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Puts the reward of each sample on its last trained token, never on a masked one behind it.

    Args:
        rewards: [N] float32.
        loss_mask: [N, L] bool, True = trained.
    Returns:
        [N, L] float32, 0 elsewhere; a row without a trained token is all 0.
    """
    num_trained_from_here = loss_mask.flip(1).cumsum(1).flip(1)
    is_last = loss_mask & (num_trained_from_here == 1)
    return torch.where(is_last, rewards[:, None], 0.0)


def grpo(token_rewards: Tensor, loss_mask: Tensor, group_ids: Tensor, *, scale: Literal["std", "none"]) -> Tensor:
    """Group-relative advantages: (R - mean) / (std + 1e-6) over the group, with R the sum of a sample's rewards.

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
    outcomes, counted = _outcomes(token_rewards, loss_mask)
    num_samples = _group_sums(counted.double(), group_ids)
    mean = _group_sums(outcomes, group_ids) / num_samples.clamp(min=1)
    advantages = torch.where(counted, outcomes - mean, 0.0)
    match scale:
        case "std":
            variance = _group_sums(advantages.square(), group_ids) / (num_samples - 1).clamp(min=1)
            advantages = advantages / (variance.sqrt() + 1e-6)
        case "none":
            pass
        case _:
            raise ValueError(f"scale={scale} is not known; use std or none")
    return _broadcast(advantages, loss_mask)


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
    outcomes, counted = _outcomes(token_rewards, loss_mask)
    num_others = _group_sums(counted.double(), group_ids) - 1
    baseline = (_group_sums(outcomes, group_ids) - outcomes) / num_others.clamp(min=1)
    return _broadcast(torch.where(num_others > 0, outcomes - baseline, 0.0), loss_mask)


def group_metrics(token_rewards: Tensor, loss_mask: Tensor, group_ids: Tensor) -> Metrics:
    """Counts the groups that teach nothing; the two counts are disjoint.

    Args:
        token_rewards: [N, L] float32; rewards where not trained are ignored.
        loss_mask: [N, L] bool, True = trained.
        group_ids: [N] int64, equal for the samples of one prompt.
    Returns:
        advantage/num_groups_without_baseline: groups in which fewer than two samples have a trained token.
        advantage/num_zero_variance_groups: the other groups whose rewards are all equal.
    """
    outcomes, counted = _outcomes(token_rewards, loss_mask)
    groups = [outcomes[counted & (group_ids == group)] for group in group_ids.unique()]
    compared = [group for group in groups if len(group) > 1]
    return {
        "advantage/num_groups_without_baseline": MetricValue.sum(len(groups) - len(compared)),
        "advantage/num_zero_variance_groups": MetricValue.sum(sum(bool((g == g[0]).all()) for g in compared)),
    }


def _outcomes(token_rewards: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Of each sample the sum of its rewards, [N] float64, and whether it has a trained token, [N] bool."""
    # The mean of equal float32 rewards is exact in float64, so a group without variance gets exactly 0. In float32 the
    # rounding error of the mean would be divided by std + 1e-6 = 1e-6.
    return torch.where(loss_mask, token_rewards.double(), 0.0).sum(1), loss_mask.any(1)


def _group_sums(values: Tensor, group_ids: Tensor) -> Tensor:
    """[N] -> [N]: for every sample the sum over its group."""
    groups, group_index = group_ids.unique(return_inverse=True)
    return values.new_zeros(len(groups)).index_add(0, group_index, values)[group_index]


def _broadcast(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    return torch.where(loss_mask, advantages[:, None].float(), 0.0)
