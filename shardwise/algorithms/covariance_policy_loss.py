"""Policy losses that hold back the few tokens whose advantage and logprob covary most, because those make a policy's
entropy fall. Inputs and outputs are those of policy_loss.py.

Shape letters: N samples of a step, L width of the padded arrays; T tokens of one packed batch.
The controller chooses the tokens from the whole optimizer step before it runs: a choice per micro-batch would change
with the split. The losses get the choice as `selected`.
"""

import torch
from torch import Tensor

from shardwise.algorithms.masked import trained_mean
from shardwise.algorithms.policy_loss import clip_fractions
from shardwise.algorithms.ratios import clamped_log_ratio
from shardwise.types import Metrics


def clip_cov_selection(
    logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    fraction: float,
    cov_low: float,
    cov_high: float,
    seed: int,
) -> Tensor:
    """Draws tokens at random among those of a step whose covariance lies in (cov_low, cov_high).

    The covariance of a token is (A - mean A) (logprob - mean logprob), means over the step's trained tokens. The draw
    depends on the seed and the tokens, not on the order of samples or the padding; tokens that agree in logprob,
    advantage and place in their response are told apart by their row alone.

    Args:
        logprobs: [N, L] float32, nats, of the policy before the step.
        advantages: [N, L] float32.
        loss_mask: [N, L] bool, True = trained; the other arrays are ignored elsewhere, NaN included.
        fraction: share of the trained tokens that is drawn, rounded down, at least one token; 2e-4 in the paper. If
            fewer tokens lie in the range, all of them are drawn.
        cov_low, cov_high: 1 and 5 in the paper.
        seed: seeds the draw; a different one for each step.
    Returns:
        [N, L] bool, a subset of loss_mask.
    Source: Cui et al. 2025 (The Entropy Mechanism of Reinforcement Learning, Clip-Cov). Differs: the choice is made
        over the whole step, so tokens that the ratio clips later are not known yet and not left out.
    """
    tokens, covariances = _token_covariances(logprobs, advantages, loss_mask)
    candidates = tokens[(covariances > cov_low) & (covariances < cov_high)]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(candidates), generator=generator)[: _num_selected(tokens, fraction)]
    return _as_mask(candidates[drawn], loss_mask)


def kl_cov_selection(logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, *, fraction: float) -> Tensor:
    """Selects the tokens of a step with the largest covariance, as defined in `clip_cov_selection`. Ties are broken by
    logprob, advantage and place in the response, and finally by row.

    Args:
        logprobs: [N, L] float32, nats, of the policy before the step.
        advantages: [N, L] float32.
        loss_mask: [N, L] bool, True = trained; the other arrays are ignored elsewhere, NaN included.
        fraction: share of the trained tokens that is chosen, rounded down, at least one token; 2e-3 or 2e-4 in the
            paper.
    Returns:
        [N, L] bool, a subset of loss_mask.
    Source: Cui et al. 2025 (KL-Cov).
    """
    tokens, covariances = _token_covariances(logprobs, advantages, loss_mask)
    largest = covariances.argsort(descending=True, stable=True)[: _num_selected(tokens, fraction)]
    return _as_mask(tokens[largest], loss_mask)


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    selected: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), and 0 on selected tokens, which still
    count in the denominators.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens: see policy_loss.py.
        selected: [T] bool, from `clip_cov_selection`.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    Returns:
        [T] float32 loss per token, 0 where not trained, and metrics over trained tokens: policy/selected_fraction,
        policy/clip_fraction_low and policy/clip_fraction_high (tokens that only the clip cuts),
        policy/log_ratio_clamped, policy/approx_kl.
    Source: Cui et al. 2025 (Clip-Cov).
    """
    log_ratio, metrics = clamped_log_ratio(logprobs, old_logprobs, loss_mask)
    ratio = log_ratio.exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    free_advantages = advantages.masked_fill(selected, 0.0)
    metrics |= clip_fractions(ratio, free_advantages, loss_mask, low=1 - clip_low, high=1 + clip_high)
    metrics["policy/selected_fraction"] = trained_mean(selected, loss_mask)
    return torch.where(loss_mask & ~selected, losses, 0.0), metrics


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    selected: Tensor,
    *,
    coef: float,
) -> tuple[Tensor, Metrics]:
    """The surrogate -r A, unclipped, with the penalty coef |log r| added on selected tokens.

    Args:
        logprobs, old_logprobs, advantages, loss_mask, cu_seqlens: see policy_loss.py.
        selected: [T] bool, from `kl_cov_selection`.
        coef: weight of the penalty, >= 0; 1 in the paper.
    Returns:
        [T] float32 loss per token, 0 where not trained, and metrics over trained tokens: policy/selected_fraction,
        policy/log_ratio_clamped, policy/approx_kl.
    Source: Cui et al. 2025 (KL-Cov).
    """
    log_ratio, metrics = clamped_log_ratio(logprobs, old_logprobs, loss_mask)
    losses = -advantages * log_ratio.exp() + torch.where(selected, coef * log_ratio.abs(), 0.0)
    metrics["policy/selected_fraction"] = trained_mean(selected, loss_mask)
    return torch.where(loss_mask, losses, 0.0), metrics


def _token_covariances(logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the K trained tokens of a step, [K, 2] int64 (row, column), and their covariances, [K] float64."""
    tokens, place = loss_mask.nonzero(), loss_mask.cumsum(1)[loss_mask]
    logprob, advantage = logprobs[loss_mask].double(), advantages[loss_mask].double()
    # Sorted by their values, the tokens sum to the same bits and are drawn alike, whatever the order of samples.
    order = place.argsort(stable=True)
    order = order[advantage[order].argsort(stable=True)]
    order = order[logprob[order].argsort(stable=True)]
    logprob, advantage = logprob[order], advantage[order]
    return tokens[order], (advantage - advantage.mean()) * (logprob - logprob.mean())


def _num_selected(tokens: Tensor, fraction: float) -> int:
    return max(int(fraction * len(tokens)), 1)


def _as_mask(tokens: Tensor, loss_mask: Tensor) -> Tensor:
    selected = torch.zeros_like(loss_mask)
    selected[tokens[:, 0], tokens[:, 1]] = True
    return selected
