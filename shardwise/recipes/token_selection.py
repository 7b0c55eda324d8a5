"""The tokens that clip_cov and kl_cov treat apart from the others."""

from collections.abc import Sequence

from shardwise.algorithms import clip_cov_selection, kl_cov_selection
from shardwise.config import AlgorithmConfig
from shardwise.recipes.sample_fields import padded_field, with_field
from shardwise.types import Sample


def with_selection(samples: Sequence[Sample], config: AlgorithmConfig, *, seed: int) -> list[Sample]:
    """Marks the tokens of an optimizer step that clip_cov and kl_cov treat apart from the others."""
    chosen = config.policy_loss
    if chosen.name not in ("clip_cov", "kl_cov"):
        return list(samples)
    old, advantages, loss_mask = (padded_field(samples, name) for name in ("old_logprobs", "advantages", "loss_mask"))
    match chosen.name:
        case "clip_cov":
            selected = clip_cov_selection(
                old,
                advantages,
                loss_mask,
                fraction=chosen.fraction,
                cov_low=chosen.cov_low,
                cov_high=chosen.cov_high,
                seed=seed,
            )
        case _:
            selected = kl_cov_selection(old, advantages, loss_mask, fraction=chosen.fraction)
    return with_field(samples, "selected", selected)
