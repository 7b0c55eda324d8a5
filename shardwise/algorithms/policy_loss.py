"""Policy losses per token; the caller aggregates them over the step.

Shape letters: T tokens of one packed batch.
"""

import math

import torch
from torch import Tensor

from shardwise.algorithms.kl import kl_divergence
from shardwise.algorithms.masked import trained_mean
from shardwise.types import Metrics, MetricValue

MAX_LOG_RATIO = 20.0


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate, per token.

    With r = exp(logprobs - old_logprobs) and A the advantage:

        loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
        loss = min(loss, -dual_clip A) where A < 0

    Args:
        logprobs, old_logprobs: [T] float32, nats; aligned with the token they score.
        advantages: [T] float32.
        loss_mask: [T] bool, True = trained; the other arrays are ignored elsewhere, NaN included.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; equal in PPO, clip_high is larger in
            DAPO.
        dual_clip: bound c > 1 on ratio times |advantage| where the advantage is negative, None = off.
    Returns:
        [T] float32 loss per token, 0 where not trained, and metrics over trained tokens:
        policy/clip_fraction_low, policy/clip_fraction_high, policy/dual_clip_fraction: tokens whose gradient is cut by
            the lower clip (A < 0), the upper clip (A > 0), the dual clip (A < 0).
        policy/log_ratio_clamped: the number of tokens with |log r| > 20.
        policy/approx_kl: KL(old policy || policy), estimator k3, nats.
    Source: Schulman et al. 2017, eq. 7; two clip bounds: Yu et al. 2025 (DAPO), eq. 8; dual clip: Ye et al. 2020,
        eq. 5. Differs: the log ratio is clamped to +-20 and the clamped tokens are counted.
    """
    # Selecting before exp keeps what lies in untrained positions out of the gradient: 0 x inf would be NaN.
    log_ratio = torch.where(loss_mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    bound = math.inf if dual_clip is None else dual_clip
    losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * bound), losses)
    metrics = {
        "policy/clip_fraction_low": trained_mean((advantages < 0) & (ratio < 1 - clip_low), loss_mask),
        "policy/clip_fraction_high": trained_mean((advantages > 0) & (ratio > 1 + clip_high), loss_mask),
        "policy/dual_clip_fraction": trained_mean((advantages < 0) & (ratio > bound), loss_mask),
        "policy/log_ratio_clamped": MetricValue.sum((log_ratio.detach().abs() > MAX_LOG_RATIO).sum()),
        "policy/approx_kl": trained_mean(kl_divergence(old_logprobs, logprobs.detach(), estimator="k3"), loss_mask),
    }
    return torch.where(loss_mask, losses, 0.0), metrics
