"""Corrects, on the controller, for a rollout engine that sampled from a different distribution than the trainer's.

Shape letters: N samples of a step, L width of the padded arrays.
rho = exp(old_logprobs - rollout_logprobs) is the trainer's probability over the rollout's: how much more often the
trainer would have sampled the token. Weights multiply a token's loss, and a token of weight 0 still counts in the
denominators; a rejected token is taken out of the mask before the step is counted, so it does not.
"""

from typing import Literal

import torch
from torch import Tensor

from shardwise.algorithms.masked import trained_mean
from shardwise.algorithms.ratios import MAX_LOG_RATIO
from shardwise.types import Metrics


def rollout_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    level: Literal["token", "sequence"],
    mode: Literal["truncate", "mask"],
    low: float | None,
    high: float,
) -> Tensor:
    """Importance weights rho of the trainer over the rollout engine.

    Args:
        old_logprobs, rollout_logprobs: [N, L] float32, nats; ignored where not trained, NaN included.
        loss_mask: [N, L] bool, True = trained.
        level: "token": rho of the token; "sequence": the product of rho over the sample's trained tokens, on each of
            them. Log ratios are clamped to +-20, of tokens and of sequences.
        mode: "truncate": min(rho, high); "mask": rho where low <= rho <= high, 0 elsewhere.
        low: lower bound of rho for "mask", None = no bound; "truncate" has none.
        high: upper bound of rho, positive.
    Returns:
        [N, L] of the dtype of the logprobs, 0 where not trained; carries no graph.
    Raises:
        ValueError: an unknown level or mode; a lower bound that has no effect or lies above the upper one.
    Source: truncate: Yao et al. 2025 (TIS), high = 2; mask: Ling Team 2025 (IcePop), low = 0.5, high = 5.
    """
    if mode == "truncate" and low is not None:
        raise ValueError(f"low={low} has no effect in mode truncate; leave it out or use mode mask")
    _check_bounds(low, high)
    log_ratio = _log_ratio(old_logprobs, rollout_logprobs, loss_mask)
    match level:
        case "token":
            pass
        case "sequence":
            log_ratio = log_ratio.sum(1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        case _:
            raise ValueError(f"level={level} is not known; use token or sequence")
    ratio = log_ratio.exp()
    match mode:
        case "truncate":
            weights = ratio.clamp(max=high)
        case "mask":
            weights = torch.where(_within(ratio, low, high), ratio, 0.0)
        case _:
            raise ValueError(f"mode={mode} is not known; use truncate or mask")
    return torch.where(loss_mask, weights, 0.0).to(old_logprobs.dtype)


def rollout_rejection(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    level: Literal["token", "sequence-sum", "sequence-mean", "sequence-max"],
    estimator: Literal["k1", "k2", "k3"],
    low: float | None,
    high: float | None,
) -> Tensor:
    """Returns which trained tokens stay: those whose mismatch lies in [low, high], bounds included.

    With d = log rho of a token, clamped to +-20:

        k1   rho = e^d, the ratio itself, trainer over rollout: 1 is agreement, bounds are like 0.5 and 2
        k2   d^2 / 2, nats: 0 is agreement
        k3   e^d - d - 1, nats: 0 is agreement; its mean over sampled tokens estimates KL(rollout || trainer)

    For a whole sequence, applied to all its trained tokens:

        sequence-sum   k1: the product of rho; k2, k3: the sum
        sequence-mean  k1: the geometric mean of rho; k2, k3: the mean
        sequence-max   it stays if each of its tokens would stay at level "token"

    Args:
        old_logprobs, rollout_logprobs: [N, L] float32, nats; ignored where not trained, NaN included.
        loss_mask: [N, L] bool, True = trained.
        level, estimator: see above.
        low, high: bounds, None = no bound. k2 and k3 take no lower bound.
    Returns:
        [N, L] bool, a subset of loss_mask: the mask to train with, and to count denominators by. A trained token whose
        logprobs are NaN is rejected; one with an infinite logprob is clamped.
    Raises:
        ValueError: an unknown level or estimator; a lower bound for k2 or k3, or above the upper one; no bound at all.
    Differs: elsewhere k1 is -d, so that bounds apply to 1 / rho, and a single bound h means [1 / h, h].
    """
    if low is None and high is None:
        raise ValueError("rejection without low and high rejects nothing; set one of them or turn it off")
    _check_bounds(low, high)
    if estimator != "k1" and low is not None:
        raise ValueError(f"low={low} with estimator={estimator}: small values are agreement; set only high")
    log_ratio = _log_ratio(old_logprobs, rollout_logprobs, loss_mask)
    match estimator:
        case "k1":
            values = log_ratio  # compared as e^d below: products of rho are sums of d
        case "k2":
            values = log_ratio.square() / 2
        case "k3":
            values = torch.expm1(log_ratio) - log_ratio
        case _:
            raise ValueError(f"estimator={estimator} is not known; use k1, k2 or k3")
    if level == "sequence-sum":
        values = values.sum(1, keepdim=True)
    elif level == "sequence-mean":
        values = values.sum(1, keepdim=True) / loss_mask.sum(1, keepdim=True).clamp(min=1)
    elif level not in ("token", "sequence-max"):
        raise ValueError(f"level={level} is not known; use token, sequence-sum, sequence-mean or sequence-max")
    kept = _within(values.exp() if estimator == "k1" else values, low, high)
    if level == "sequence-max":
        kept = (kept | ~loss_mask).all(1, keepdim=True)
    return loss_mask & kept


def correction_metrics(weights: Tensor, kept: Tensor, loss_mask: Tensor, *, high: float) -> Metrics:
    """Measures what the correction did to a step, over its trained tokens before rejection.

    Args:
        weights: [N, L], from `rollout_weights`; ones where weights are off.
        kept: [N, L] bool, from `rollout_rejection`; loss_mask where rejection is off.
        loss_mask: [N, L] bool, True = trained, before rejection.
        high: the upper bound of the weights; math.inf where weights are off.
    Returns:
        rollout/weight: mean weight.
        rollout/weight_truncated_fraction: tokens whose weight is the upper bound.
        rollout/weight_masked_fraction: tokens of weight 0.
        rollout/rejected_fraction: tokens that are rejected.
        rollout/rejected_sequence_fraction: samples with a trained token that are rejected as a whole.
    """
    bound = torch.tensor(high, dtype=weights.dtype)  # rounded as the weights are
    return {
        "rollout/weight": trained_mean(weights, loss_mask),
        "rollout/weight_truncated_fraction": trained_mean(weights >= bound, loss_mask),
        "rollout/weight_masked_fraction": trained_mean(weights == 0, loss_mask),
        "rollout/rejected_fraction": trained_mean(~kept, loss_mask),
        "rollout/rejected_sequence_fraction": trained_mean(~kept.any(1), loss_mask.any(1)),
    }


def _log_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns log rho, [N, L] float64, clamped to +-20, 0 where not trained."""
    difference = torch.where(loss_mask, old_logprobs.detach().double() - rollout_logprobs.double(), 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _within(values: Tensor, low: float | None, high: float | None) -> Tensor:
    """Whether each value lies in [low, high]; None is no bound, and NaN lies within none."""
    return (values >= (-torch.inf if low is None else low)) & (values <= (torch.inf if high is None else high))


def _check_bounds(low: float | None, high: float | None) -> None:
    if high is not None and high <= 0:
        raise ValueError(f"high={high} must be positive")
    if low is not None and high is not None and low > high:
        raise ValueError(f"low={low} lies above high={high}")
