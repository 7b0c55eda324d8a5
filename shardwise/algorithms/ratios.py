"""How far the trainer and the rollout engine disagree about the same tokens under the same weights.

Shape letters: T tokens of one packed batch.
"""

import torch
from torch import Tensor

from shardwise.algorithms.kl import kl_divergence
from shardwise.algorithms.masked import trained_mean
from shardwise.types import Metrics, MetricValue


def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> Metrics:
    """Compares the trainer's logprobs with those the tokens were sampled under.

    Args:
        logprobs: [T] float32, nats, of the trainer, temperature applied.
        rollout_logprobs: [T] float32, nats, of the distribution that sampled the tokens.
        loss_mask: [T] bool, True = trained; T >= 1.
    Returns:
        rollout/logprob_abs_diff, rollout/logprob_abs_diff_max: mean and largest |logprobs - rollout_logprobs|, nats.
        rollout/kl_k3: KL(rollout || trainer), estimator k3, nats.
    """
    abs_diff = torch.where(loss_mask, logprobs.detach() - rollout_logprobs, 0.0).abs()
    return {
        "rollout/logprob_abs_diff": trained_mean(abs_diff, loss_mask),
        "rollout/logprob_abs_diff_max": MetricValue.max(abs_diff.max()),
        "rollout/kl_k3": trained_mean(kl_divergence(rollout_logprobs, logprobs.detach(), estimator="k3"), loss_mask),
    }
