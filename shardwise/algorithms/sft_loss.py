"""The loss of supervised fine-tuning, per token; the caller aggregates it over the step.

Shape letters: T tokens of one packed batch.
"""

import torch
from torch import Tensor


def cross_entropy(logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Negative log-likelihood of each trained token.

    Args:
        logprobs: [T] float32, nats, of the token at each position.
        loss_mask: [T] bool, True = trained.
    Returns:
        [T] float32, nats, 0 where not trained.
    """
    return torch.where(loss_mask, -logprobs, 0.0)
