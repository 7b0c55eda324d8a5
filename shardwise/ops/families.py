"""Which model families packed training and cached generation can compute. Both ask here, before any number exists.

Both replace a model's attention through transformers' registry and leave everything else as it is. That is exact for
decoder-only models in which tokens see each other through registered attention and nowhere else; any other model would
run without an error and give wrong numbers.
"""

import inspect
from typing import Any

from torch import nn

LAYER_TYPES = {"full_attention", "sliding_attention"}

UNREGISTERED_ATTENTION = "does not support attention implementations that are registered with transformers"
DROPS_KEYWORDS = "does not pass keyword arguments on to its attention"


def unsupported_reason(model: Any, *, has_projection: bool = True) -> str | None:
    """What the class and the config of a model (transformers' PreTrainedModel) say against it.

    The flags are what a family claims. That every layer really calls the registered attention shows in the forward
    pass, where engine and rollout count the calls.

    Args:
        has_projection: False for a model with a value head, which needs no output projection.
    Returns:
        A sentence that names the model and what is not supported about it, or None.
    """
    if (reason := _reason(model, has_projection)) is None:
        return None
    return f"{type(model).__name__} (model_type {model.config.model_type}) is not supported: it {reason}"


def _reason(model: Any, has_projection: bool) -> str | None:
    config = model.config.get_text_config()
    other_layers = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    parameters = inspect.signature(model.base_model.forward).parameters
    head = model.get_output_embeddings()
    if model._is_stateful:
        return "carries a recurrent state from token to token"
    if other_layers:
        return f"has layers of type {', '.join(other_layers)}; supported are {', '.join(sorted(LAYER_TYPES))}"
    if not model._supports_attention_backend:
        return UNREGISTERED_ATTENTION
    if config.is_encoder_decoder:
        return "is an encoder-decoder model"
    if has_projection and head is None:
        return "has no output projection"
    if getattr(head, "bias", None) is not None:
        return "has a bias on its output projection"
    if not decoder_layers(model):
        return f"has no list of num_hidden_layers={config.num_hidden_layers} decoder layers"
    if any(getattr(part, "is_causal", True) is False for layer in decoder_layers(model) for part in layer.modules()):
        return "has attention that is not causal"
    if "position_ids" not in parameters:
        return "takes no position_ids"
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        return DROPS_KEYWORDS
    return None


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers of a causal language model: the outermost ModuleList of its decoder that is as long as the config says
    (lists of experts lie inside the layers). Empty if there is none.

    `_no_split_modules` is no replacement: some families leave it empty, and others name parts of a layer in it.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    return next((list(modules) for modules in lists if len(modules) == num_layers), [])
