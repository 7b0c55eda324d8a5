"""The class of transformers that goes with a head, and one made of its parts for families that have none.

transformers has a value head that fits any backbone, and classes with it for some families only. For the others the
class is made here, by the same two bases as transformers' own, and its code is written beside the weights, so that
`AutoModelForTokenClassification.from_pretrained(folder, trust_remote_code=True)` loads them. Here a family says by
itself which class it takes, and no code of a folder is ever run.
"""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightTransform
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from shardwise.engine.heads import HeadName
from shardwise.families import language_model_class

AUTO_CLASSES = {
    "token_values": AutoModelForTokenClassification,
    "sequence_scores": AutoModelForSequenceClassification,
}
"""What transformers calls the model that goes with each value head."""

GENERIC_CLASSES: dict[str, type] = {
    "token_values": GenericForTokenClassification,
    "sequence_scores": GenericForSequenceClassification,
}

CODE_NAME = "modeling_head.py"
"""The file with the code of a class that was made here."""


def kind_of(head: HeadName) -> str:
    """As in transformers' names: CausalLM, TokenClassification or SequenceClassification."""
    auto = AutoModelForCausalLM if head == "logprobs" else AUTO_CLASSES[head]
    return auto.__name__.removeprefix("AutoModelFor")


def model_from_config(config: PreTrainedConfig, head: HeadName, **options: Any) -> PreTrainedModel:
    """A model with this head, of transformers' own class where the family has one.

    Args:
        options: of `from_config`: dtype, attn_implementation.
    Raises:
        ValueError: the family has no such model and no language model either. KeyError, TypeError and others of
            transformers: the config cannot be used.
    """
    made = None if head == "logprobs" else _made_class(config, head)
    if made is not None:
        return declaring_float32(made._from_config(config, **options))
    auto = language_model_of(config) if head == "logprobs" else AUTO_CLASSES[head]
    return declaring_float32(auto.from_config(config, **options))


def declaring_float32(model: PreTrainedModel) -> PreTrainedModel:
    """Adds to what the model says that it keeps in float32 what its class builds so in any dtype, for `from_pretrained`
    leaves both in float32. Returns the model."""
    with torch.device("meta"):
        built = type(model)._from_config(deepcopy(model.config), dtype=torch.bfloat16)
    said = model._keep_in_fp32_modules_strict
    said |= {re.sub(r"\d+", "*", name) for name, tensor in built.state_dict().items() if tensor.dtype == torch.float32}
    return model


def class_named(name: str, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class made here that has this name, if it fits the config."""
    classes = (_made_class(config, head) for head in GENERIC_CLASSES)
    return next((made for made in classes if made is not None and made.__name__ == name), None)


def auto_map(model: PreTrainedModel) -> dict[str, str]:
    """What config.json says of the class of a model that was made here, as `save_pretrained` writes it: the auto class
    and the place of the code. Empty for classes of transformers."""
    if type(model).__module__ != __name__:
        return {}
    name = type(model).__name__
    return {f"AutoModelFor{name.rpartition('For')[2]}": f"{Path(CODE_NAME).stem}.{name}"}


def class_code(model: PreTrainedModel) -> str:
    """The content of CODE_NAME: the class that was made here, for transformers alone. It brings `language_model_rules`,
    for an adapter with a head is put onto the folder of the family's language model."""
    made = type(model)
    generic, family = made.__bases__
    config = made.config_class
    imported = registered = ""
    if language_model_rules(model):
        imported = (
            "from transformers.conversion_mapping import get_checkpoint_conversion_mapping, "
            "register_checkpoint_conversion_mapping\n"
        )
        registered = f"""

# transformers goes by the name of a class for how weights of this family are named in files
register_checkpoint_conversion_mapping(
    "{made.__name__}",
    get_checkpoint_conversion_mapping("{_language_model_class(model).__name__}"),
    overwrite=True,
)
"""
    return f'''"""transformers' head for any backbone on one for which it has no such class."""

{imported}from transformers.modeling_layers import {generic.__name__}
from {config.__module__} import {config.__name__}
from {family.__module__} import {family.__name__}


class {made.__name__}({generic.__name__}, {family.__name__}):
    config_class = {config.__name__}

    @classmethod
    def is_custom_code(cls):
        return False  # of others transformers neither converts all names nor fills all buffers
{registered}'''


def language_model_rules(model: PreTrainedModel) -> list[WeightTransform]:
    """For a model whose class was made here: how transformers reads the folder of the family's language model, from
    which it may start, where that goes by the name of the class (Qwen2.5-VL)."""
    if not auto_map(model):
        return []
    return get_checkpoint_conversion_mapping(_language_model_class(model).__name__) or []


def _language_model_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """What transformers calls the language model of its family."""
    found: type[PreTrainedModel] = language_model_of(model.config)._model_mapping[type(model.config)]
    return found


def language_model_of(config: PreTrainedConfig) -> Any:
    """The auto class that builds the family's language model."""
    return language_model_class(config, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)


def _made_class(config: PreTrainedConfig, head: str) -> type[PreTrainedModel] | None:
    """As transformers writes its own: the generic head, then the base of all classes of the family. None where
    transformers has a class, and for a family without a language model."""
    headed, language_models = AUTO_CLASSES[head]._model_mapping, language_model_of(config)._model_mapping
    if type(config) in headed and headed[type(config)].__module__.startswith("transformers."):
        return None
    if type(config) not in language_models:
        return None
    language_model, generic = language_models[type(config)], GENERIC_CLASSES[head]
    family = [base for base in language_model.__mro__ if issubclass(base, PreTrainedModel)][-2]
    content = {
        "__module__": __name__,
        "config_class": type(config),
        "is_custom_code": classmethod(lambda cls: False),
        "_keys_to_ignore_on_load_unexpected": language_model._keys_to_ignore_on_load_unexpected,
    }
    name = type(config).__name__.removesuffix("Config") + generic.__name__.removeprefix("Generic")
    return type(name, (generic, family), content)
