"""The KL divergence from the reference policy: how it is estimated, and how its weight moves."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from shardwise.config.base import Choice
from shardwise.config.custom import Custom, named


class K1(Choice):
    """logprob - ref logprob: unbiased, but only noise in a loss."""

    name: Literal["k1"] = "k1"


class Abs(Choice):
    """|logprob - ref logprob|: a distance."""

    name: Literal["abs"] = "abs"


class K2(Choice):
    """Half the squared difference."""

    name: Literal["k2"] = "k2"


class K3(Choice):
    """e^x - x - 1 with x = ref logprob - logprob: unbiased and never negative."""

    name: Literal["k3"] = "k3"


class K1Plus(Choice):
    """The value of k1, the gradient of k2."""

    name: Literal["k1+"] = "k1+"


class AbsPlus(Choice):
    """The value of abs, the gradient of k2."""

    name: Literal["abs+"] = "abs+"


class K2Plus(Choice):
    """The same as k2, whose own gradient it is."""

    name: Literal["k2+"] = "k2+"


class K3Plus(Choice):
    """The value of k3, the gradient of k2."""

    name: Literal["k3+"] = "k3+"


KlEstimator = Annotated[
    K1 | Abs | K2 | K3 | K1Plus | AbsPlus | K2Plus | K3Plus | Custom, Field(discriminator="name"), named("k3")
]


class FixedKl(Choice):
    """kl_coef stays as it is."""

    name: Literal["fixed"] = "fixed"


class AdaptiveKl(Choice):
    """kl_coef rises while the KL divergence is above its target, and falls below it."""

    name: Literal["adaptive"] = "adaptive"
    target: PositiveFloat
    """The mean KL divergence per token to hold, in nats."""
    horizon: PositiveInt = 10_000
    """Samples after which a constant error of 20 % has changed the coefficient by 20 %."""


KlController = Annotated[FixedKl | AdaptiveKl | Custom, Field(discriminator="name"), named("fixed")]
