"""Which ranks train and which sample."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from shardwise.config.base import Choice, WholeDeadline, by_type


class Colocated(Choice):
    """Every rank trains and samples in turn."""

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
    """How many ranks sample: the last ones of the job."""
    timeout_seconds: WholeDeadline = 3600
    """How long a sampling rank may take for one batch of requests, however many of them it has answered by then."""
    medium: Literal["process_group", "shared_memory", "disk"] = "process_group"
    """What carries the policy's weights to the ranks that sample. process_group: gloo or NCCL, between any hosts.
    shared_memory: host memory that all of them have mapped, which needs them on the host of rank 0. disk: safetensors
    files in `folder`."""
    folder: Annotated[Path, AfterValidator(Path.expanduser)] | None = None
    """With medium=disk: a folder that rank 0 and the ranks that sample share and that nothing else uses; another run
    (told apart by trainer.output_dir) is refused. The newest version stays in it when the run ends, for other engines
    to load; with `delta` it is only what changed since the version before, which none can load."""
    delta: bool = False
    """Send only the elements whose value in engine.param_dtype a step has changed. Rank 0 keeps a copy of the weights
    in that dtype. Changes no number; the metric sync/bytes shows what it saves."""

    @model_validator(mode="after")
    def _require_folder_of_disk(self) -> Self:
        if self.medium == "disk" and self.folder is None:
            raise ValueError("medium=disk needs `folder`: one that rank 0 and the ranks that sample share")
        if self.medium != "disk" and self.folder is not None:
            raise ValueError(f"folder={self.folder} would change nothing with medium={self.medium}; set medium=disk")
        return self


Placement = Annotated[Colocated | Split, Field(discriminator="type"), by_type("split")]
