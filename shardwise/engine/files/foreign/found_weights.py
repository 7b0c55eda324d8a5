"""A model's tensors among those of another trainer's checkpoint."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from shardwise.config import ConfigError
from shardwise.engine.files.conversions import export_blocks
from shardwise.engine.files.foreign.tensors import ShardedTensors
from shardwise.engine.runtime_state import runtime_state


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """A model's tensors among those of a checkpoint that holds more."""

    prefix: str
    """What stood before the names of the model's tensors: "" or such as "app.model."."""
    weights: ShardedTensors
    """The model's tensors, under their own names."""
    left_out: list[str]
    """The names of all other tensors."""


def find_weights(source: ShardedTensors, model: PreTrainedModel, *, prefix: str | None = None) -> FoundWeights:
    """Finds a model's tensors among those of a checkpoint.

    Args:
        model: on the meta device; its names are looked for.
        prefix: what stands before the names of the model's tensors; None: what fits most of them.
    Raises:
        ConfigError: nothing begins with the prefix, or several prefixes fit equally well.
    """
    runtime = runtime_state(model)
    hub = {name for block in export_blocks(model, runtime, torch.float32) for name in block.hub_tensors}
    wanted = runtime.keys() | hub
    backbone = {name.removeprefix(f"{model.base_model_prefix}.") for name in wanted}  # saved without its head
    candidates = [prefix] if prefix is not None else [source.prefix_of(wanted), source.prefix_of(backbone), ""]
    prefix = next(candidate for candidate in candidates if candidate is not None)
    chosen = source.under(prefix)
    if not prefix:  # beside the model's tensors may stand an optimizer's
        groups = {name.partition(".")[0] for name in wanted | backbone}
        own = {name: tensor for name, tensor in source.tensors.items() if name.partition(".")[0] in groups}
        chosen = ShardedTensors(source.folder, own)
    if not chosen.tensors:
        raise ConfigError(
            f"{source.folder} holds no tensor under the prefix {prefix!r}; its names are such as "
            f"{', '.join(list(source.tensors)[:3])}; give what stands before the model's names as --prefix"
        )
    taken = {f"{prefix}{name}" for name in chosen.tensors}
    return FoundWeights(prefix, chosen, [name for name in source.tensors if name not in taken])
