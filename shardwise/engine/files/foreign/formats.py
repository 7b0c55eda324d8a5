"""The formats of other trainers' checkpoints that can be read: each is a reader in a file of its own."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, Self

from transformers import PreTrainedModel

from shardwise.config import ConfigError
from shardwise.engine.files.foreign.dcp import DcpCheckpoint
from shardwise.engine.files.foreign.found_weights import FoundWeights
from shardwise.engine.files.foreign.tensors import ShardedTensor, ShardedTensors
from shardwise.engine.files.foreign.verl import VerlCheckpoint


class ForeignCheckpoint(Protocol):
    """What a reader has found in a folder, before a tensor is read."""

    FILES: ClassVar[str]
    """The files that a folder of this format has, in words."""

    @classmethod
    def find(cls, source: Path) -> Path | None:
        """Returns the folder of this format that `source` is or contains; None if there is none."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Reads what a folder that `find` returned holds, and no tensor yet. Raises ModelError: it is damaged,
        incomplete or asks to run code."""
        ...

    @property
    def folder(self) -> Path: ...

    @property
    def tensors(self) -> ShardedTensors:
        """All tensors but those of optimizers that have files of their own."""
        ...

    @property
    def title(self) -> str:
        """The format and the number of its files, in words."""
        ...

    def find_weights(self, model: PreTrainedModel, prefix: str | None) -> FoundWeights:
        """Finds a model's tensors.

        Args:
            model: on the meta device.
            prefix: what stands before the names of the model's tensors, with or without its last dot; None: what fits
                most of them.
        Raises:
            ConfigError: nothing begins with the prefix, several prefixes fit equally well, or the format has none.
        """
        ...

    def optimizer_states(self, parameters: Sequence[str], weights: FoundWeights) -> dict[str, ShardedTensor]:
        """Returns the states of the optimizer of these weights by "KEY/NAME", such as "exp_avg/model.norm.weight";
        perhaps of fewer parameters.

        Args:
            parameters: names of the model's parameters in the order of its modules.
        Raises:
            ModelError: as `open`, or the states do not belong to these parameters. ConfigError: several optimizers fit
                all the same.
        """
        ...

    def left_out(self, weights: FoundWeights, states: Collection[ShardedTensor]) -> list[str]:
        """Returns in words what the checkpoint holds beside these weights and optimizer states."""
        ...


READERS: tuple[type[ForeignCheckpoint], ...] = (DcpCheckpoint, VerlCheckpoint)
"""The readers of all formats, in the order in which they look at a folder."""


def open_checkpoint(source: Path) -> ForeignCheckpoint:
    """Opens a checkpoint of any format. Raises ConfigError: there is none; ModelError: as `ForeignCheckpoint.open`."""
    for reader in READERS:
        if (folder := reader.find(source)) is not None:
            return reader.open(folder)
    what = "holds no checkpoint of another trainer" if source.is_dir() else "is no folder"
    raise ConfigError(f"{source} {what}; give a folder with {', or with '.join(reader.FILES for reader in READERS)}")
