"""Which ranks train and which sample."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from shardwise.config.base import Choice, by_type


class Colocated(Choice):
    """Every rank does both in turn."""

    tag: ClassVar[str] = "type"
    type: Literal["colocated"] = "colocated"
    """colocated: every rank trains and samples in turn; split: the last ranks of the job only sample. The name alone
    stands for the defaults."""


class Split(Choice):
    """The last ranks of the job sample and hold no other engine; the others train. Both work at the same time where
    rollout.max_staleness allows it."""

    tag: ClassVar[str] = "type"
    type: Literal["split"] = "split"
    """split: the last ranks of the job only sample."""
    num_ranks: PositiveInt = 1
    """So many ranks sample."""
    timeout_seconds: PositiveInt = 3600
    """How long a sampling rank may take for one batch of requests."""
    medium: Literal["process_group", "shared_memory"] = "process_group"
    """What carries the policy's weights to the ranks that sample: broadcasts (gloo, NCCL), or host memory that all of
    them have mapped, which needs them on the host of rank 0."""
    delta: bool = False
    """Send only the elements whose value in engine.param_dtype a step has changed. Rank 0 keeps a copy of the weights
    in that dtype. Changes no number; sync/bytes tells what it saves."""


Placement = Annotated[Colocated | Split, Field(discriminator="type"), by_type("split")]
