"""Binds the corrections of rollout logprobs of `algorithms` to a config, and to the samples of a step."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.algorithms import correction_metrics, mismatch_metrics, rollout_rejection, rollout_weights
from shardwise.config import AlgorithmConfig, Custom, MismatchRejection, RatioWeights
from shardwise.recipes.custom import CustomFunction
from shardwise.recipes.sample_fields import padded_field, with_field
from shardwise.types import Metrics, Sample


def with_rollout_correction(samples: Sequence[Sample], config: AlgorithmConfig) -> tuple[list[Sample], Metrics]:
    """Adds importance weights, and removes rejected tokens from the loss and so from its denominators.

    Returns:
        The samples, and metrics of how far trainer and rollout were apart before, if there are trainer's logprobs.
    """
    correction = config.rollout_correction
    if not config.needs_old_logprobs:
        return list(samples), {}
    old, rollout, loss_mask = (
        padded_field(samples, name) for name in ("old_logprobs", "rollout_logprobs", "loss_mask")
    )
    apart = mismatch_metrics(old, rollout, loss_mask)
    if not correction.compares:
        return list(samples), apart
    weights, kept = torch.ones_like(old), loss_mask
    if correction.weights is not None:
        weights = _weights(correction.weights, old, rollout, loss_mask)
    if correction.rejection is not None:
        kept = _kept(correction.rejection, old, rollout, loss_mask)
    corrected = with_field(with_field(samples, "importance_weights", weights), "loss_mask", kept)
    high = correction.weights.high if isinstance(correction.weights, RatioWeights) else math.inf
    return corrected, apart | correction_metrics(weights, kept, loss_mask, high=high)


def _weights(chosen: RatioWeights | Custom, old: Tensor, rollout: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns [N, L] importance weights, 0 where a token is not trained."""
    if not isinstance(chosen, Custom):
        return rollout_weights(old, rollout, loss_mask, **chosen.arguments())
    own = CustomFunction.load(chosen, key="algorithm.rollout_correction.weights")
    meaning = "one finite weight for each trained token"
    weights = own.tensor(own(old, rollout, loss_mask), old.shape, meaning=meaning, finite_at=loss_mask)
    return torch.where(loss_mask, weights.detach(), 0.0).to(old.dtype)


def _kept(chosen: MismatchRejection | Custom, old: Tensor, rollout: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns [N, L] bool: the trained tokens that stay."""
    if not isinstance(chosen, Custom):
        return rollout_rejection(old, rollout, loss_mask, **chosen.arguments())
    own = CustomFunction.load(chosen, key="algorithm.rollout_correction.rejection")
    kept = own.tensor(own(old, rollout, loss_mask), old.shape, meaning="true for each token that stays", is_mask=True)
    return loss_mask & kept
