"""A model without values: the names, shapes and dtypes that weights come with, for engines that keep weights in a form
of their own and cannot give them back."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from shardwise.families import language_model_class
from shardwise.model_config import blaming_config, read_generation_config, read_model_config, require_generates
from shardwise.stored_dtypes import stored_dtypes


def load_skeleton(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Builds a folder's transformers model on the meta device, in the dtypes of `from_pretrained(dtype=...)`. Raises
    ModelError if transformers cannot read it."""
    config = read_model_config(folder)
    require_generates(folder, config)
    with blaming_config(folder, "generation"), torch.device("meta"):
        model_class = language_model_class(config, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)
        model = model_class.from_config(config, dtype=dtype)
    tensors = model.state_dict(keep_vars=True)
    for name, stored in stored_dtypes(model, tensors, dtype).items():
        if stored == torch.float32:  # from_config does not always ask what a family keeps so
            tensors[name].data = tensors[name].data.float()
    if (generation := read_generation_config(folder, is_saved_again=False)) is not None:
        model.generation_config = generation
    return model


def served_by(skeleton: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yields the skeleton's tensors under the names of the transformers class, without tied copies."""
    tied = set(skeleton.get_expanded_tied_weights_keys())
    return ((name, tensor) for name, tensor in skeleton.state_dict().items() if name not in tied)


def in_hub_names(skeleton: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Converts tensors of the transformers class to the form of a hub checkpoint: its names, fused experts split."""
    for name, tensor in weights:
        yield from revert_weight_conversion(skeleton, {name: tensor}).items()
