"""The critic's loss per token, and how much of the returns it explains.

Shape letters: T tokens of one packed batch; N samples of a step, L width of the padded arrays.
"""

import math

import torch
from torch import Tensor

from shardwise.algorithms.masked import trained_mean
from shardwise.types import Metrics, MetricValue


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, *, clip: float | None
) -> tuple[Tensor, Metrics]:
    """0.5 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2), per token; the caller aggregates.

    Args:
        values: [T] float32, the critic's.
        old_values: [T] float32, the critic's before the first optimizer step on the sample.
        returns: [T] float32.
        loss_mask: [T] bool, True = trained; the other arrays are ignored elsewhere, NaN included.
        clip: how far a value may move from its old one before its gradient is cut, None = off.
    Returns:
        [T] float32 loss per token, 0 where not trained, and means over trained tokens: critic/value, critic/return,
        critic/clip_fraction (tokens whose gradient is cut).
    Source: Schulman et al. 2017 (PPO), as in the authors' baselines; Ouyang et al. 2022 (InstructGPT).
    """
    # Selecting first keeps what lies in untrained positions out of the gradient: 0 x NaN would be NaN.
    predicted, old, target = (torch.where(loss_mask, array, 0.0) for array in (values, old_values, returns))
    bound = math.inf if clip is None else clip
    losses = (predicted - target).square()
    clipped_losses = (predicted.clamp(old - bound, old + bound) - target).square()
    metrics = {
        "critic/value": trained_mean(values, loss_mask),
        "critic/return": trained_mean(returns, loss_mask),
        "critic/clip_fraction": trained_mean(clipped_losses > losses, loss_mask),
    }
    return torch.maximum(losses, clipped_losses) / 2, metrics


def explained_variance(values: Tensor, returns: Tensor, loss_mask: Tensor) -> Metrics:
    """1 - Var(R - V) / Var(R) over the trained tokens of a step, on the controller.

    1 is a perfect critic, 0 one that is no better than the mean return, and a negative value one that is worse.

    Args:
        values: [N, L] float32, the critic's before the optimizer steps on these samples.
        returns: [N, L] float32.
        loss_mask: [N, L] bool, True = trained.
    Returns:
        critic/explained_variance; 0 where the returns have no variance.
    """
    targets, errors = returns[loss_mask].double(), (returns - values)[loss_mask].double()
    # Without trained tokens both sums are 0: the means are NaN, but there is no element to subtract them from.
    total = (targets - targets.mean()).square().sum()
    left = (errors - errors.mean()).square().sum()
    return {"critic/explained_variance": MetricValue.mean(torch.where(total > 0, 1 - left / total, 0.0), 1.0)}
