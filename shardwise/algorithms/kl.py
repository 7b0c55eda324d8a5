"""Per-token estimates of the KL divergence between two policies from the logprobs of sampled tokens.

Shape letters: T tokens of one packed batch.
"""

from typing import Literal

import torch
from torch import Tensor


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimates KL(policy || reference) from tokens that the policy sampled.

    With x = ref_logprobs - logprobs:

        k1 = -x            unbiased, can be negative, high variance
        k2 = x^2 / 2       biased, never negative
        k3 = e^x - x - 1   unbiased, never negative; x is clamped to +-20, the result to +-10

    In a loss, on tokens of the current policy, the gradient is another matter than the value. The gradient of k1 is not
    that of the KL: it is the gradient of `logprobs` alone, whose expectation is 0, so k1 in a loss only adds noise (in
    a reward it is right). The expected gradient of k2 is that of KL(policy || reference), of k3, where nothing is
    clamped, that of KL(reference || policy).

    Args:
        logprobs: [T] float32, nats, of the policy that sampled the tokens.
        ref_logprobs: [T] float32, nats, of the policy it is compared with.
        estimator: one of the names above.
    Returns:
        [T] float32, nats; 0 where both logprobs are 0. Where k3 is clamped its gradient is 0.
    Raises:
        ValueError: an unknown estimator.
    Source: Schulman 2020, "Approximating KL Divergence". Differs: the clamps of k3, and expm1 for small x.
    """
    log_ratio = ref_logprobs - logprobs
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            # The result's clamp alone would not do: where e^x overflows, its gradient is 0 x inf = NaN.
            log_ratio = log_ratio.clamp(-20, 20)
            return (torch.expm1(log_ratio) - log_ratio).clamp(-10, 10)
        case _:
            raise ValueError(f"estimator={estimator} is not known; use k1, k2 or k3")
