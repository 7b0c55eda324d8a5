"""How training corrects for a rollout engine whose logprobs differ from the trainer's."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from shardwise.config.base import Choice, Config
from shardwise.config.custom import Custom, named


class RatioWeights(Choice):
    """The ratio of policy probability to rollout probability, bounded."""

    name: Literal["ratio"] = "ratio"
    level: Literal["token", "sequence"] = "token"
    """The ratio of each token, or of its whole sequence."""
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate: at most `high` (TIS); mask: 0 outside [low, high] (IcePop)."""
    low: NonNegativeFloat | None = None
    """The lower bound, for mode=mask."""
    high: PositiveFloat = 2.0
    """The upper bound."""

    @model_validator(mode="after")
    def _bounds_are_used(self) -> Self:
        if (self.mode == "mask") != (self.low is not None):
            raise ValueError(f"mode={self.mode} with low={self.low}: mask needs a lower bound, truncate has none")
        _require_order(low=self.low, high=self.high)
        return self


class MismatchRejection(Choice):
    """Tokens or sequences on which trainer and rollout engine disagree are rejected."""

    name: Literal["mismatch"] = "mismatch"
    level: Literal["token", "sequence-sum", "sequence-mean", "sequence-max"] = "token"
    """What is rejected: single tokens, or whole sequences by the sum, mean or maximum over their tokens."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """What is compared with the bounds. k1: the ratio policy / rollout itself; k2, k3: the KL estimate."""
    low: NonNegativeFloat | None = None
    """What lies below this is rejected; null is no bound."""
    high: PositiveFloat | None = 2.0
    """What lies above this is rejected; null is no bound."""

    @model_validator(mode="after")
    def _bounds_are_used(self) -> Self:
        if self.estimator != "k1" and self.low is not None:
            raise ValueError(
                f"low={self.low} with estimator={self.estimator}: small values of k2 and k3 are agreement; set only "
                "high"
            )
        if self.low is None and self.high is None:
            raise ValueError("low=null and high=null reject nothing; set one, or remove rejection")
        _require_order(low=self.low, high=self.high)
        return self


RolloutWeights = Annotated[RatioWeights | Custom, Field(discriminator="name"), named("ratio")]
Rejection = Annotated[MismatchRejection | Custom, Field(discriminator="name"), named("mismatch")]


class RolloutCorrectionConfig(Config):
    """How training corrects for a rollout engine whose logprobs differ from the trainer's."""

    bypass: bool = False
    """Use the rollout's logprobs as old_logprobs: one forward pass fewer; the ratio of the policy loss corrects."""
    weights: RolloutWeights | None = None
    """Multiply each token's policy loss by an importance weight."""
    rejection: Rejection | None = None
    """Leave tokens out of the loss and of its denominators."""

    @property
    def compares(self) -> bool:
        """Whether the correction needs the trainer's logprobs beside the rollout's."""
        return self.weights is not None or self.rejection is not None

    @model_validator(mode="after")
    def _bypass_stands_alone(self) -> Self:
        if self.bypass and self.compares:
            raise ValueError(
                "bypass=true makes old_logprobs the rollout's own, so weights and rejection would compare them with "
                "themselves; remove bypass, or weights and rejection"
            )
        return self


def _require_order(*, low: float | None, high: float | None) -> None:
    if low is not None and high is not None and low > high:
        raise ValueError(f"low={low} is above high={high}; swap them")
