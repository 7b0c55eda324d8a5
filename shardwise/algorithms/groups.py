"""Statistics over the groups of a step: the completions of one prompt.

Shape letters: N samples of a step, L width of the padded arrays. Samples of one group may lie anywhere in N.
Everything is float64: the mean of equal float32 rewards is then exact, so a group without variance deviates by exactly
0. In float32 the rounding error of the mean would be divided by std + 1e-6 = 1e-6.
"""

import torch
from torch import Tensor


def sample_outcomes(token_rewards: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of each sample's rewards on trained tokens, [N] float64, and whether it has such a token, [N] bool."""
    return torch.where(loss_mask, token_rewards, 0.0).sum(1, dtype=torch.float64), loss_mask.any(1)


def group_sums(values: Tensor, group_ids: Tensor) -> Tensor:
    """[N] -> [N]: for every sample the sum over its group."""
    groups, group_index = group_ids.unique(return_inverse=True)
    return values.new_zeros(len(groups)).index_add(0, group_index, values)[group_index]


def group_maxima(values: Tensor, group_ids: Tensor) -> Tensor:
    """[N] -> [N]: for every sample the largest value of its group."""
    groups, group_index = group_ids.unique(return_inverse=True)
    lowest = values.new_full((len(groups),), -torch.inf)
    return lowest.scatter_reduce(0, group_index, values, "amax")[group_index]


def group_means(outcomes: Tensor, counted: Tensor, group_ids: Tensor) -> Tensor:
    """[N] -> [N] float64: for every sample the mean over the samples of its group that count, 0 if none does."""
    num_samples = group_sums(counted.double(), group_ids)
    return group_sums(torch.where(counted, outcomes, 0.0), group_ids) / num_samples.clamp(min=1)


def group_deviations(outcomes: Tensor, counted: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each outcome's deviation from the mean of its group, and the group's unbiased standard deviation.

    Args:
        outcomes: [N] float64; those of samples that do not count are ignored.
        counted: [N] bool.
        group_ids: [N] int64.
    Returns:
        [N] and [N] float64; the deviation is 0 where a sample does not count or is alone, and the standard deviation of
        a group of one is 0.
    """
    deviations = torch.where(counted, outcomes - group_means(outcomes, counted, group_ids), 0.0)
    num_others = group_sums(counted.double(), group_ids) - 1
    return deviations, (group_sums(deviations.square(), group_ids) / num_others.clamp(min=1)).sqrt()


def has_baseline(counted: Tensor, group_ids: Tensor) -> Tensor:
    """[N] bool: whether the sample counts and at least one other sample of its group does too."""
    return counted & (group_sums(counted.double(), group_ids) > 1)


def spread_over_tokens(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """[N] -> [N, L] float32: the sample's advantage on every trained token, 0 elsewhere."""
    return torch.where(loss_mask, advantages[:, None].float(), 0.0)
