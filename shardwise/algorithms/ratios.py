"""Ratios of two policies' probabilities for the same tokens, and how far the policies disagree.

Shape letters: T tokens of one packed batch.
A log ratio is clamped to +-20 wherever it is exponentiated: e^20 is far outside every clip, but its square and its sums
still fit into float32. Each clamped token is counted, so that a broken engine is seen and not smoothed over.
"""

import torch
from torch import Tensor

from shardwise.algorithms.kl import kl_divergence
from shardwise.algorithms.masked import trained_mean
from shardwise.types import Metrics, MetricValue

MAX_LOG_RATIO = 20.0


def clamped_log_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> tuple[Tensor, Metrics]:
    """Returns the clamped log ratio that every policy loss begins with.

    Args:
        logprobs, old_logprobs: [T] float32, nats; aligned with the token they score.
        loss_mask: [T] bool, True = trained; the other arrays are ignored elsewhere, NaN included.
    Returns:
        [T] logprobs - old_logprobs clamped to +-20, 0 where not trained; no gradient where clamped. And metrics:
        policy/log_ratio_clamped: the number of trained tokens with |log ratio| > 20.
        policy/approx_kl: KL(old policy || policy), estimator k3, nats, mean over trained tokens.
    """
    # Selecting before exp keeps what lies in untrained positions out of the gradient: 0 x inf would be NaN.
    log_ratio = torch.where(loss_mask, logprobs - old_logprobs, 0.0)
    metrics = {
        "policy/log_ratio_clamped": _num_clamped(log_ratio),
        "policy/approx_kl": trained_mean(kl_divergence(old_logprobs, logprobs.detach(), estimator="k3"), loss_mask),
    }
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), metrics


def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> Metrics:
    """Compares the trainer's logprobs with those the tokens were sampled under, before any correction.

    With rho = exp(logprobs - rollout_logprobs), the log ratio clamped to +-20. Everything but the maximum and the count
    is a mean over trained tokens, so that the parts of micro-batches and ranks merge exactly;
    `derived_mismatch_metrics` computes from the merged means what is not a mean itself.

    Args:
        logprobs: [T] float32, nats, of the trainer, temperature applied, no top-k or top-p.
        rollout_logprobs: [T] float32, nats, of the distribution that sampled the tokens.
        loss_mask: [T] bool, True = trained; T >= 1.
    Returns:
        rollout/logprob_abs_diff, rollout/logprob_abs_diff_max: mean and largest |logprobs - rollout_logprobs|, nats.
        rollout/kl_k3: KL(rollout || trainer), estimator k3, nats.
        rollout/log_ratio_clamped: the number of tokens with |log rho| > 20.
        rollout/ratio, rollout/ratio_squared: rho (1 in expectation) and rho^2.
        rollout/logprob, policy/logprob: logprob of the sampled tokens under the rollout engine and the trainer, nats.
    """
    logprobs = logprobs.detach()
    log_ratio = torch.where(loss_mask, logprobs - rollout_logprobs, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "rollout/logprob_abs_diff": trained_mean(log_ratio.abs(), loss_mask),
        "rollout/logprob_abs_diff_max": MetricValue.max(log_ratio.abs().max()),
        "rollout/kl_k3": trained_mean(kl_divergence(rollout_logprobs, logprobs, estimator="k3"), loss_mask),
        "rollout/log_ratio_clamped": _num_clamped(log_ratio),
        "rollout/ratio": trained_mean(ratio, loss_mask),
        "rollout/ratio_squared": trained_mean(ratio.square(), loss_mask),
        "rollout/logprob": trained_mean(rollout_logprobs, loss_mask),
        "policy/logprob": trained_mean(logprobs, loss_mask),
    }


def derived_mismatch_metrics(metrics: Metrics) -> Metrics:
    """Computes what follows from the means of `mismatch_metrics` once they are merged over the whole step.

    Args:
        metrics: merged; other names in it are ignored.
    Returns:
        rollout/chi2: chi-squared divergence of trainer and rollout, mean of rho^2 minus 1. Estimated from the same
            tokens, it can be below 0.
        rollout/effective_sample_size: (mean rho)^2 / mean rho^2, as a share of the trained tokens, 0..1.
        rollout/perplexity, policy/perplexity: exp(-mean logprob) under the rollout engine and the trainer.
        If no token is trained, these are 0, 1, 1 and 1.
    Differs: elsewhere perplexities are means over sequences of exp(-mean); here every token weighs the same.
    """
    if float(metrics["rollout/ratio"].count) == 0:
        ratio = ratio_squared = 1.0
    else:
        ratio, ratio_squared = metrics["rollout/ratio"].result(), metrics["rollout/ratio_squared"].result()
    derived = {
        "rollout/chi2": ratio_squared - 1,
        "rollout/effective_sample_size": ratio * ratio / ratio_squared,
        "rollout/perplexity": _perplexity(metrics["rollout/logprob"]),
        "policy/perplexity": _perplexity(metrics["policy/logprob"]),
    }
    return {name: MetricValue.mean(value, 1.0) for name, value in derived.items()}


def _num_clamped(log_ratio: Tensor) -> MetricValue:
    return MetricValue.sum((log_ratio.detach().abs() > MAX_LOG_RATIO).sum())


def _perplexity(mean_logprob: MetricValue) -> float:
    # math.exp raises where this is infinite.
    return float(torch.tensor(-mean_logprob.result(), dtype=torch.float64).exp())
