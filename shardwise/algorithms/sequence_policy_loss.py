"""Policy losses with a ratio for each sequence; inputs and outputs as in policy_loss.py.

Shape letters: T tokens of one packed batch, S sequences of it.
A sequence's value is spread over its tokens without a gradient, and each token carries the gradient of its own logprob.
Where the tokens of a sequence share one advantage the sum over the sequence has the value and the gradient of the
paper's formula, in every aggregation, because all of them weigh the tokens of a sequence equally.

Below l = clamp(logprobs - old_logprobs, +-20) per token, A is the advantage, and sg stops the gradient.
"""

import torch
from torch import Tensor

from shardwise.algorithms.masked import sequence_means, sequence_sums, spread, trained_mean
from shardwise.algorithms.policy_loss import clip_fractions, weighted_log_likelihood
from shardwise.algorithms.ratios import MAX_LOG_RATIO, clamped_log_ratio
from shardwise.types import Metrics


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """PPO's clip on the ratio of the sequence, s = exp(mean of l over its trained tokens):
    loss = max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A), with s = sg(s) exp(l - sg(l)) on each token.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens: see policy_loss.py.
        clip_low, clip_high: s is clipped to [1 - clip_low, 1 + clip_high]; 3e-4 and 4e-4 in the paper. A sequence is
            cut as a whole.
    Returns:
        [T] float32 loss per token, 0 where not trained, and metrics over trained tokens: policy/clip_fraction_low,
        policy/clip_fraction_high, policy/log_ratio_clamped, policy/approx_kl.
    Source: Zheng et al. 2025 (GSPO, the token variant); with seq-mean-token-mean it is their objective.
    """
    log_ratio, metrics = clamped_log_ratio(logprobs, old_logprobs, loss_mask)
    mean = spread(sequence_means(log_ratio, loss_mask, cu_seqlens), cu_seqlens, len(log_ratio))
    ratio = _with_token_gradient(mean, log_ratio).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    metrics |= clip_fractions(ratio, advantages, loss_mask, low=1 - clip_low, high=1 + clip_high)
    return torch.where(loss_mask, losses, 0.0), metrics


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """The geometric mean of clipped token ratios: loss = -A exp(mean of c over the sequence's trained tokens), with
    c = min(l, clip_high) where A > 0 and c = max(l, -clip_low) where A < 0. A clipped token has no gradient.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens: see policy_loss.py.
        clip_low, clip_high: bounds on the log ratio, 0.4 and 0.4 in the paper: ratios between e^-0.4 and e^0.4.
    Returns:
        [T] float32 loss per token, 0 where not trained, and metrics over trained tokens: policy/clip_fraction_low,
        policy/clip_fraction_high, policy/log_ratio_clamped, policy/approx_kl.
    Source: Zhao et al. 2025 (GMPO); with seq-mean-token-mean it is their objective. Differs: nothing is averaged
        over the micro-batch, and each token has its own advantage (the same one in the paper).
    """
    log_ratio, metrics = clamped_log_ratio(logprobs, old_logprobs, loss_mask)
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    clipped = torch.where(loss_mask, clipped, 0.0)
    mean = spread(sequence_means(clipped, loss_mask, cu_seqlens), cu_seqlens, len(clipped))
    losses = -advantages * _with_token_gradient(mean, clipped).exp()
    metrics |= clip_fractions(log_ratio, advantages, loss_mask, low=-clip_low, high=clip_high)
    return torch.where(loss_mask, losses, 0.0), metrics


def topr(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    ratio_cap: float,
) -> tuple[Tensor, Metrics]:
    """Good samples are imitated, bad ones are pushed away only while the policy still produces them:
    loss = -w A logprob with w = 1 where A >= 0 and w = sg(min(ratio of the sequence, ratio_cap)) where A < 0.

    The ratio of a sequence is exp(sum of l over its trained tokens), the sum clamped to +-20.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens: see policy_loss.py.
        ratio_cap: the largest weight of a bad sample, 1 in the paper.
    Returns:
        [T] float32 loss per token, 0 where not trained, and metrics over trained tokens: policy/clip_fraction_high
        (A < 0 and the ratio above the cap), policy/log_ratio_clamped, policy/approx_kl.
    Source: Le Roux et al. 2025 (TOPR) with a+ = b+ = 1, a- = 0, b- = ratio_cap. Differs: the sign is that of the
        token's advantage, which is the sample's wherever advantages come from outcomes.
    """
    log_ratio, metrics = clamped_log_ratio(logprobs, old_logprobs, loss_mask)
    sums = sequence_sums(log_ratio.detach(), cu_seqlens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = spread(sums.exp(), cu_seqlens, len(log_ratio))
    metrics["policy/clip_fraction_high"] = trained_mean((advantages < 0) & (ratio > ratio_cap), loss_mask)
    weights = torch.where(advantages < 0, ratio.clamp(max=ratio_cap), 1.0)
    return weighted_log_likelihood(logprobs, weights * advantages, loss_mask), metrics


def kimi(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    tau: float,
) -> tuple[Tensor, Metrics]:
    """Policy mirror descent: sum of the losses of a sequence = -A q + tau / 2 q^2, with q the sum of l over its trained
    tokens. That is (A - tau q)^2 / (2 tau) without its constant: the squared loss of the paper.

    On each token the value is (-A + tau / 2 q) l and the gradient -A + tau q.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens: see policy_loss.py; advantages without a division by
            the standard deviation (grpo with scale none) are those of the paper.
        tau: strength of the pull towards the old policy, >= 0.
    Returns:
        [T] float32 loss per token, 0 where not trained, and policy/log_ratio_clamped, policy/approx_kl.
    Source: Kimi Team 2025 (Kimi k1.5), section 2.3.2; with seq-mean-token-sum it is their gradient.
    """
    log_ratio, metrics = clamped_log_ratio(logprobs, old_logprobs, loss_mask)
    total = spread(sequence_sums(log_ratio.detach(), cu_seqlens), cu_seqlens, len(log_ratio))
    losses = (tau * total - advantages) * log_ratio - tau / 2 * total * log_ratio.detach()
    return torch.where(loss_mask, losses, 0.0), metrics


def _with_token_gradient(values: Tensor, tokens: Tensor) -> Tensor:
    """Returns the value of `values` with the gradient of `tokens`."""
    return values.detach() + (tokens - tokens.detach())
