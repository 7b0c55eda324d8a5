"""Policy losses with a ratio for each token; the caller aggregates them over the step.

Shape letters: T tokens of one packed batch, S sequences of it.
Every policy loss has the same inputs:
    logprobs: [T] float32, nats, of the current policy; the only input with a gradient.
    old_logprobs: [T] float32, nats, of the policy before the step; aligned with the token they score.
    advantages: [T] float32.
    loss_mask: [T] bool, True = trained; the other arrays are ignored elsewhere, NaN included.
    cu_seqlens: [S + 1] int32; a sequence lies in one micro-batch as a whole. Read only where ratios are
        per sequence.
and gives [T] float32 losses, 0 where not trained, and metrics over trained tokens, policy/log_ratio_clamped (tokens
with |log ratio| > 20) and policy/approx_kl among them. None averages over a batch: a token's loss is the same for every
split of a step over micro-batches and ranks.

Below r = exp(logprobs - old_logprobs), the log ratio clamped to +-20, A is the advantage, and sg stops the gradient.
"""

import math

import torch
from torch import Tensor

from shardwise.algorithms.masked import trained_mean
from shardwise.algorithms.ratios import clamped_log_ratio
from shardwise.types import Metrics


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate, per token.

        loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
        loss = min(loss, -dual_clip A) where A < 0

    Args:
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens: see above.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; equal in PPO, clip_high is larger in
            DAPO.
        dual_clip: bound c > 1 on ratio times |advantage| where the advantage is negative, None = off.
    Returns:
        [T] float32 loss per token, 0 where not trained, and metrics over trained tokens:
        policy/clip_fraction_low, policy/clip_fraction_high, policy/dual_clip_fraction: tokens whose gradient is cut by
            the lower clip (A < 0), the upper clip (A > 0), the dual clip (A < 0).
        policy/log_ratio_clamped, policy/approx_kl.
    Source: Schulman et al. 2017, eq. 7; two clip bounds: Yu et al. 2025 (DAPO), eq. 8; dual clip: Ye et al. 2020,
        eq. 5. Differs: the log ratio is clamped to +-20 and the clamped tokens are counted.
    """
    log_ratio, metrics = clamped_log_ratio(logprobs, old_logprobs, loss_mask)
    ratio = log_ratio.exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    bound = math.inf if dual_clip is None else dual_clip
    losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * bound), losses)
    metrics |= clip_fractions(ratio, advantages, loss_mask, low=1 - clip_low, high=1 + clip_high)
    metrics["policy/dual_clip_fraction"] = trained_mean((advantages < 0) & (ratio > bound), loss_mask)
    return torch.where(loss_mask, losses, 0.0), metrics


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """Uses the clipped ratio as a constant weight, so no token loses its gradient:
    loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens: see above.
        clip_low, clip_high: as in ppo_clip; clip_low >= 1 leaves only the upper bound, as in the paper.
    Returns:
        [T] float32 loss per token, 0 where not trained, and metrics over trained tokens:
        policy/clip_fraction_low, policy/clip_fraction_high: tokens whose weight is below or above the clip, whatever
            the sign of A.
        policy/log_ratio_clamped, policy/approx_kl.
    Source: MiniMax 2025 (MiniMax-M1), section 3.1.
    """
    log_ratio, metrics = clamped_log_ratio(logprobs, old_logprobs, loss_mask)
    ratio = log_ratio.detach().exp()
    metrics["policy/clip_fraction_low"] = trained_mean(ratio < 1 - clip_low, loss_mask)
    metrics["policy/clip_fraction_high"] = trained_mean(ratio > 1 + clip_high, loss_mask)
    weights = ratio.clamp(1 - clip_low, 1 + clip_high)
    return weighted_log_likelihood(logprobs, weights * advantages, loss_mask), metrics


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
) -> tuple[Tensor, Metrics]:
    """A soft gate in place of the clip: loss = -(4 / tau) sigmoid(tau (r - 1)) A.

    At r = 1 its gradient is that of -r A; away from it the gradient fades, faster for a larger tau.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens: see above.
        tau_positive, tau_negative: tau where A > 0 and elsewhere, positive; 1.0 and 1.05 in the paper.
    Returns:
        [T] float32 loss per token, 0 where not trained, and policy/log_ratio_clamped, policy/approx_kl.
    Source: Gao et al. 2025 (SAPO).
    """
    log_ratio, metrics = clamped_log_ratio(logprobs, old_logprobs, loss_mask)
    # Filled on the device: copying a tensor from the host would wait for the device.
    positive, negative = (log_ratio.new_full((), tau) for tau in (tau_positive, tau_negative))
    tau = torch.where(advantages > 0, positive, negative)
    losses = -4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * advantages
    return torch.where(loss_mask, losses, 0.0), metrics


def reinforce(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Metrics]:
    """-A logprob per token, the plain policy gradient; also the loss of GPG.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens: see above; old_logprobs serve only for the metrics.
    Returns:
        [T] float32 loss per token, 0 where not trained, and policy/log_ratio_clamped, policy/approx_kl.
    Source: Williams 1992; Chu et al. 2025 (GPG).
    """
    _, metrics = clamped_log_ratio(logprobs, old_logprobs, loss_mask)
    return weighted_log_likelihood(logprobs, advantages, loss_mask), metrics


def weighted_log_likelihood(logprobs: Tensor, weights: Tensor, loss_mask: Tensor) -> Tensor:
    """[T] -sg(weight) logprob, 0 where not trained."""
    return -torch.where(loss_mask, weights.detach(), 0.0) * torch.where(loss_mask, logprobs, 0.0)


def clip_fractions(ratio: Tensor, advantages: Tensor, loss_mask: Tensor, *, low: float, high: float) -> Metrics:
    """Fractions of trained tokens whose gradient a clip to [low, high] cuts: below it if A < 0, above it if A > 0."""
    return {
        "policy/clip_fraction_low": trained_mean((advantages < 0) & (ratio < low), loss_mask),
        "policy/clip_fraction_high": trained_mean((advantages > 0) & (ratio > high), loss_mask),
    }
