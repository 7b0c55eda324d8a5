"""The weights of a sharded model under the names that its files have."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.engine.files.conversions import export_blocks
from shardwise.engine.gathering import gathered_blocks
from shardwise.engine.runtime_state import merged_state, runtime_state


def hub_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Collective. Yields (hub name, full tensor) as exports write them: fused experts taken apart, adapters merged."""
    for block, wholes in gathered_blocks(merged_state(model), export_blocks(model, runtime_state(model), dtype)):
        yield from block.convert(wholes)
