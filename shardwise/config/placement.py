"""Which ranks train and which sample."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from shardwise.config.base import Choice
from shardwise.config.custom import named


class Colocated(Choice):
    """Every rank does both in turn."""

    name: Literal["colocated"] = "colocated"


class Split(Choice):
    """The last ranks of the job sample and hold no other engine; the others train. Both work at the same time where
    rollout.max_staleness allows it."""

    name: Literal["split"] = "split"
    num_ranks: PositiveInt = 1
    """So many ranks sample."""
    timeout_seconds: PositiveInt = 3600
    """How long a sampling rank may take for one batch of requests."""


Placement = Annotated[Colocated | Split, Field(discriminator="name"), named("split")]
