"""Policy losses with a trust region on probabilities, not on their ratio; inputs and outputs as in policy_loss.py.

Shape letters: T tokens of one packed batch, S sequences of it.
A ratio clip stops a rare token's probability from doubling from 1e-4, yet lets a frequent token's fall from 0.99 to
0.8. Here a token is trained while the two policies, seen as coins that show either this token or another one, are
close.
"""

import torch
from torch import Tensor

from shardwise.algorithms.masked import trained_mean
from shardwise.algorithms.policy_loss import weighted_log_likelihood
from shardwise.algorithms.ratios import clamped_log_ratio
from shardwise.types import Metrics

MAX_WEIGHT = 20.0
"""Where the importance weight is truncated, a bound that only accidents reach: section 5.4 of the paper."""


def dppo_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    threshold_low: float,
    threshold_high: float,
) -> tuple[Tensor, Metrics]:
    """loss = -sg(min(r, 20)) A logprob where the probability p has not moved too far yet, and 0 elsewhere.

    Too far means p - p_old > threshold_high where A > 0, and p - p_old < -threshold_low elsewhere; |p - p_old| is the
    total variation distance between the two coins.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens: see policy_loss.py.
        threshold_low, threshold_high: largest allowed change of a probability, down and up, 0..1.
    Returns:
        [T] float32 loss per token, 0 where not trained, and metrics over trained tokens:
        policy/clip_fraction_low, policy/clip_fraction_high: tokens without a gradient, A <= 0 and A > 0.
        policy/log_ratio_clamped, policy/approx_kl.
    Source: Qi et al. 2026 (DPPO, arXiv 2602.04879), binary total variation.
    """
    log_ratio, metrics = clamped_log_ratio(logprobs, old_logprobs, loss_mask)
    change = logprobs.detach().exp() - old_logprobs.exp()
    too_far = torch.where(advantages > 0, change > threshold_high, change < -threshold_low)
    return _trusted(logprobs, log_ratio, advantages, loss_mask, too_far, metrics)


def dppo_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    threshold_low: float,
    threshold_high: float,
) -> tuple[Tensor, Metrics]:
    """Like `dppo_tv`, but too far means KL(old coin || coin) above threshold_high where A > 0 and p > p_old, or above
    threshold_low where A <= 0 and p < p_old, with KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)).

    Args:
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens: see policy_loss.py.
        threshold_low, threshold_high: largest allowed KL in nats, for a probability that falls and for one that rises.
    Returns:
        [T] float32 loss per token, 0 where not trained, and metrics over trained tokens:
        policy/clip_fraction_low, policy/clip_fraction_high: tokens without a gradient, A <= 0 and A > 0.
        policy/log_ratio_clamped, policy/approx_kl.
    Source: Qi et al. 2026 (DPPO), binary KL. Differs: 1 - p is computed as -expm1(logprob) and is at least 1e-8.
    """
    log_ratio, metrics = clamped_log_ratio(logprobs, old_logprobs, loss_mask)
    change = log_ratio.detach()
    rest = -torch.expm1(logprobs.detach()).clamp(max=-1e-8)
    old_rest = -torch.expm1(old_logprobs).clamp(max=-1e-8)
    divergence = -old_logprobs.exp() * change + old_rest * (old_rest / rest).log()
    too_far = torch.where(
        advantages > 0,
        (divergence > threshold_high) & (change > 0),
        (divergence > threshold_low) & (change < 0),
    )
    return _trusted(logprobs, log_ratio, advantages, loss_mask, too_far, metrics)


def _trusted(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, too_far: Tensor, metrics: Metrics
) -> tuple[Tensor, Metrics]:
    weights = log_ratio.detach().exp().clamp(max=MAX_WEIGHT).masked_fill(too_far, 0.0)
    metrics["policy/clip_fraction_low"] = trained_mean(too_far & (advantages <= 0), loss_mask)
    metrics["policy/clip_fraction_high"] = trained_mean(too_far & (advantages > 0), loss_mask)
    return weighted_log_likelihood(logprobs, weights * advantages, loss_mask), metrics
