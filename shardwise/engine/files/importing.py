"""The weights of another trainer's checkpoint, written as a Hugging Face folder, one block at a time."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.engine.files.conversions import ImportBlock
from shardwise.engine.files.export import export_folder
from shardwise.engine.files.foreign import ShardedTensors
from shardwise.engine.files.loading import checked_blocks, require_same_copy
from shardwise.engine.runtime_state import runtime_state


def import_weights(
    model: PreTrainedModel,
    source: ShardedTensors,
    tokenizer: Any,
    target: Path,
    dtype: torch.dtype,
    *,
    max_shard_size: str,
) -> None:
    """Writes the weights as a Hugging Face folder, in a process group of one rank. The peak in memory is the largest
    block: a tensor, or the experts of one layer.

    Args:
        model: on the meta device.
        source: tensors under the names of the model's class, or of its files on the hub.
        target: the folder; what is there is replaced when everything is written.
    Raises:
        ModelError: tensors are missing, left over or of another shape, or a file is damaged or asks to run code.
        ExportError: target cannot be written.
    """
    weights = RuntimeWeights(model, source)
    export_folder(model, tokenizer, target, dtype, max_shard_size=max_shard_size, weights=weights)


class RuntimeWeights(Mapping[str, Tensor]):
    """Runtime name -> whole tensor, read and converted when it is asked for. Each can be asked for once."""

    def __init__(self, model: PreTrainedModel, source: ShardedTensors) -> None:
        """Raises ModelError: the source does not fit the model; lists why."""
        self._source = source
        self._block_of: dict[str, ImportBlock] = {}
        blocks, self._copies_of = checked_blocks(model, runtime_state(model), source)
        for block in blocks:
            self._block_of |= dict.fromkeys(self._targets(block), block)
        self._waiting: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._waiting:
            block = self._block_of[name]
            self._waiting |= block.convert({stored: self._source.read(stored) for stored in block.stored_names()})
            if stored_copy := self._copies_of.get(name):
                found = self._source.read(stored_copy)
                require_same_copy(stored_copy, name, found, self._waiting[name], self._source.folder)
        return self._waiting.pop(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._block_of)

    def __len__(self) -> int:
        return len(self._block_of)

    def _targets(self, block: ImportBlock) -> list[str]:
        if block.has_one_target:
            return [block.first_target]
        specs = self._source.specs
        empty = {
            name: torch.empty(specs[name].shape, dtype=specs[name].dtype, device="meta")
            for name in block.stored_names()
        }
        return list(block.convert(empty))
