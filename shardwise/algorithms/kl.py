"""Per-token estimates of the KL divergence between two policies from the logprobs of sampled tokens.

Shape letters: T tokens of one packed batch.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: KLEstimator) -> Tensor:
    """Estimates KL(policy || reference) from tokens that the policy sampled.

    With x = ref_logprobs - logprobs:

        k1 = -x            unbiased, can be negative, high variance
        abs = |x|          no estimate of the KL, but a distance
        k2 = x^2 / 2       biased, never negative
        k3 = e^x - x - 1   unbiased, never negative; x is clamped to +-20, the result to +-10

    In a loss on tokens of the current policy the gradient counts, and it is another question than the value. The
    gradient of k1 is not that of the KL: it is the gradient of `logprobs` alone, whose expectation is 0, so k1 in a
    loss only adds noise (in a reward it is right). The expected gradient of k2 is that of KL(policy || reference); that
    of k3, where nothing is clamped, is the gradient of KL(reference || policy). A name with a + has the value of the
    name without it and the gradient of k2.

    Args:
        logprobs: [T] float32, nats, of the policy that sampled the tokens.
        ref_logprobs: [T] float32, nats, of the policy it is compared with.
        estimator: one of the names above.
    Returns:
        [T] float32, nats; 0 where both logprobs are 0. Where k3 is clamped, its gradient is 0, but that of k3+ is not.
    Raises:
        ValueError: an unknown estimator.
    Source: Schulman 2020, "Approximating KL Divergence". Differs: the clamps of k3, expm1 for small x, and the +.
    """
    log_ratio = ref_logprobs - logprobs
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"estimator={estimator} is not known; use one of {', '.join(get_args(KLEstimator))}")
    match estimator.removesuffix("+"):
        case "k1":
            value = -log_ratio
        case "abs":
            value = log_ratio.abs()
        case "k2":
            value = log_ratio.square() / 2
        case "k3":
            # Clamping the result alone would not be enough: where e^x overflows, its gradient is 0 x inf = NaN.
            clamped = log_ratio.clamp(-20, 20)
            value = (torch.expm1(clamped) - clamped).clamp(-10, 10)
    if not estimator.endswith("+"):
        return value
    k2 = log_ratio.square() / 2
    return value.detach() + (k2 - k2.detach())


def adaptive_kl_coef(coef: float, kl: float, *, target: float, horizon: int, num_samples: int) -> float:
    """Returns the KL coefficient of the next step: coef (1 + error num_samples / horizon) with
    error = clip(kl / target - 1, -0.2, 0.2).

    Args:
        coef: this step's coefficient, >= 0; 0 stays 0.
        kl: the KL measured in this step, nats, mean over trained tokens.
        target: the KL to aim at, in the same unit, positive.
        horizon: number of samples, positive, that change the coefficient by 20 % at the largest error.
        num_samples: number of samples in this step.
    Returns:
        The next coefficient, never below 0.
    Raises:
        ValueError: a target or horizon that is not positive.
    Source: Ziegler et al. 2019 (Fine-Tuning Language Models from Human Preferences), section 2.2.
        Differs: where a step has more than 5 horizons of samples the coefficient stops at 0 and does not change sign.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"target={target} and horizon={horizon} must both be positive")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return max(coef * (1 + error * num_samples / horizon), 0.0)
