"""A policy loss of one's own: REINFORCE that learns less from bad samples than from good ones.

algorithm:
  policy_loss:
    name: custom
    function: examples/custom_loss/asymmetric.py:asymmetric
    parameters: {bad: 0.3}
"""

import torch
from torch import Tensor

from shardwise.types import Metrics, MetricValue


def asymmetric(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    bad: float = 0.5,
) -> tuple[Tensor, Metrics]:
    """Args: all [T], tokens of several sequences one after the other; sequence s is cu_seqlens[s] to cu_seqlens[s + 1].

    Returns the loss of every token, [T], and metrics. Shardwise divides by the counts of the whole optimizer step, so
    sum nothing up here: a mean over these tokens would depend on how the step is split.
    """
    weight = torch.where(advantages < 0, bad, 1.0)
    losses = torch.where(loss_mask, -weight * advantages * logprobs, 0.0)
    num_bad = (loss_mask & (advantages < 0)).sum()
    return losses, {"policy/bad_tokens": MetricValue.mean(num_bad, loss_mask.sum())}
