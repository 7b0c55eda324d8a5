"""AdamW's states of another trainer's checkpoint, written as the training state of an engine."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from shardwise.config import ModelError
from shardwise.engine.agreement import named_failures
from shardwise.engine.files.foreign import ShardedTensor
from shardwise.engine.files.safetensors_file import TensorSpec, differences
from shardwise.engine.files.state_files import Cut, Part, ShardFile, StateIndex, shard_name
from shardwise.engine.optim.optimizer import MASTER
from shardwise.engine.shards import num_rows_of

_KEYS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True)
class AdamWStates:
    """AdamW's states for the parameters that a run trains."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the trained parameters."""
    tensors: Mapping[str, ShardedTensor]
    """States by "KEY/NAME", such as "exp_avg/NAME"."""
    num_updates: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], states: Mapping[str, ShardedTensor]) -> Self:
        """Takes the states of the trained parameters.

        Args:
            states: name such as "exp_avg/NAME" -> state, perhaps of more parameters.
        Raises:
            ModelError: a trained parameter lacks a state, or one has another shape or is none of AdamW's.
        """
        wanted = {f"{key}/{name}": form for name, shape in shapes.items() for key, form in _forms(shape).items()}
        found = {name: state for name, state in states.items() if name.partition("/")[2] in shapes}
        if problems := differences(wanted, {name: state.spec.shape for name, state in found.items()}):
            raise ModelError(
                f"the optimizer's states are not AdamW's for the parameters that the run trains: {problems}; train the "
                "same parameters, or import the weights alone (without --config)"
            )
        return cls(shapes, found, max(int(found[f"step/{name}"].read()) for name in shapes))

    def write(self, folder: Path, masters: Mapping[str, Tensor]) -> None:
        """Writes what `checkpoint.load_state` reads on any layout, for float32 masters. The peak in memory is one
        tensor.

        Args:
            masters: the weights of the trained parameters, each asked for once.
        Raises:
            ModelError: a file of the source is damaged. ExportError: folder cannot be written.
        """
        specs = {f"{MASTER}{name}": TensorSpec(torch.float32, shape) for name, shape in self.shapes.items()}
        specs |= {name: TensorSpec(torch.float32, state.spec.shape) for name, state in self.tensors.items()}
        whole = {rows: Cut((Part(0, rows, shard_name(0)),)) for rows in {num_rows_of(s.shape) for s in specs.values()}}
        cuts = {name: whole[num_rows_of(spec.shape)] for name, spec in specs.items()}
        with named_failures(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = ShardFile.write(folder / shard_name(0), specs, self._values(masters))
            StateIndex(specs, cuts, {shard_name(0): file}, self._numbers).write(folder)

    def _values(self, masters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name in self.shapes:
            yield f"{MASTER}{name}", masters[name].float()
        for name, state in self.tensors.items():
            yield name, state.read().float()

    @property
    def _numbers(self) -> dict[str, int | None]:
        """What `ShardedOptimizer.numbers` gives for an optimizer in float32 that has skipped no step."""
        return {
            "num_steps": self.num_updates,
            "num_nonfinite_in_a_row": 0,
            "num_updates": None,
            "loss_scaler": None,
        }


def _forms(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of a parameter's states, by key."""
    return {key: () if key == "step" else shape for key in _KEYS}
