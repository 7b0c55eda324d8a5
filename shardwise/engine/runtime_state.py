"""The tensors of a model under the names of its transformers class, whatever has been put into its module tree."""

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from shardwise.engine.quantized import quantized_weights
from shardwise.ops import plain_name


def runtime_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Name -> parameter or persistent buffer. For a model with adapters these are the base's, and its quantized weights
    are outlines without memory."""
    state: dict[str, Tensor] = model.state_dict()
    if not has_adapters(model):
        return state
    base_state = {base: state[name] for name, base in runtime_names(model).items()}
    return base_state | {name: layer.outline() for name, layer in quantized_weights(model).items()}


def runtime_names(model: PreTrainedModel) -> dict[str, str]:
    """Name in `model.state_dict()` -> name in `runtime_state`, for what is in both."""
    if not has_adapters(model):
        return {name: name for name in model.state_dict()}
    from shardwise.engine.lora import base_names  # importing peft takes seconds

    return {name: base for name, base in base_names(model).items() if base is not None}


def copied_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Like `runtime_state`, but only the trained copies of `modules_to_save`."""
    if not has_adapters(model):
        return {}
    from shardwise.engine.lora import base_names, trained_copies

    state, names = model.state_dict(), base_names(model)
    found = {names[original]: state[trained] for original, trained in trained_copies(model).items()}
    return {name: tensor for name, tensor in found.items() if name is not None}


def merged_state(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Like `runtime_state`; adapters are merged into a tensor (sharded, float32) when it is asked for."""
    if not has_adapters(model):
        return runtime_state(model)
    from shardwise.engine.merging import MergedState

    return MergedState(model)


def trained_names(model: PreTrainedModel) -> set[str]:
    """Names of the trained parameters, tied ones under each of their names. Those of adapters are in no
    `runtime_state`."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {plain_name(name) for name, parameter in parameters if parameter.requires_grad}


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether a model has adapters: peft leaves its configuration on the models it changes."""
    return hasattr(model, "peft_config")


def buffer_names(model: PreTrainedModel) -> set[str]:
    """Names of all buffers, also of those that no checkpoint holds."""
    return {plain_name(name) for name, _ in model.named_buffers()}
