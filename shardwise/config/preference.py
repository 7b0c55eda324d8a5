"""The losses of preference training, reward models and distillation."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from shardwise.config.base import Choice, Config
from shardwise.config.custom import Custom, named
from shardwise.config.temperature import Temperature


class Dpo(Choice):
    """Direct preference optimization."""

    name: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    """How strongly the policy is held to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of pairs whose label is taken to be wrong."""


class Ipo(Choice):
    """DPO's margin, pulled to a fixed target instead of to infinity."""

    name: Literal["ipo"] = "ipo"
    beta: PositiveFloat = 0.1
    """The target margin is 1 / (2 beta)."""


class Simpo(Choice):
    """Length-normalized logprobs instead of a reference policy."""

    name: Literal["simpo"] = "simpo"
    beta: PositiveFloat = 2.0
    """The scale of the margin."""
    gamma: NonNegativeFloat = 1.0
    """The margin that a pair should have, in units of the scaled margin."""


class Orpo(Choice):
    """Cross-entropy of the chosen answer and an odds-ratio penalty; no reference policy."""

    name: Literal["orpo"] = "orpo"
    beta: PositiveFloat = 0.1
    """The weight of the penalty."""


class Kto(Choice):
    """Desirable and undesirable answers, unpaired."""

    name: Literal["kto"] = "kto"
    beta: PositiveFloat = 0.1
    """How strongly the policy is held to the reference."""
    desirable_weight: NonNegativeFloat = 1.0
    """The weight of desirable answers."""
    undesirable_weight: NonNegativeFloat = 1.0
    """The weight of undesirable answers."""


class CustomPreference(Custom):
    """A custom loss, on pairs or on labelled answers."""

    is_paired: bool = True
    """true: a loss of pairs. false: a loss of single answers that are desirable or not, like kto; with a reference it
    also gets an estimate of the divergence from that."""
    uses_reference: bool = True
    """Whether the loss compares with a reference policy; false builds none, and ref_sums are 0."""


PreferenceLoss = Annotated[Dpo | Ipo | Simpo | Orpo | Kto | CustomPreference, Field(discriminator="name"), named("dpo")]

REFERENCE_FREE = frozenset({"simpo", "orpo"})
"""Losses that need no reference policy."""


class BradleyTerry(Choice):
    """The chosen answer scores higher than the rejected one, by the margin if there is one."""

    name: Literal["bradley_terry"] = "bradley_terry"
    center_coef: NonNegativeFloat = 0.0
    """The weight of the squared sum of a pair's scores, which keeps scores around 0."""


RewardModelLoss = Annotated[BradleyTerry | Custom, Field(discriminator="name"), named("bradley_terry")]


class ForwardKl(Choice):
    """KL(teacher || student): the student covers what the teacher does."""

    name: Literal["forward_kl"] = "forward_kl"


class ReverseKl(Choice):
    """KL(student || teacher): the student does only what the teacher does."""

    name: Literal["reverse_kl"] = "reverse_kl"


class JensenShannon(Choice):
    """The KL divergence of teacher and of student, each from their mixture."""

    name: Literal["jensen_shannon"] = "jensen_shannon"
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The teacher's share of the mixture."""


Divergence = Annotated[ForwardKl | ReverseKl | JensenShannon | Custom, Field(discriminator="name"), named("forward_kl")]


class DistillationConfig(Config):
    """How the student follows the teacher."""

    divergence: Divergence = ForwardKl.defaults()
    """The divergence between teacher and student, per token over the whole vocabulary; a name, {name, parameters}, or
    an import path."""
    temperature: Temperature = 1.0
    """The temperature of both distributions."""
    cross_entropy_coef: NonNegativeFloat = 0.0
    """The weight of the cross-entropy of the data's own tokens, which is added to the divergence."""
