"""The dtypes in which the weights of a model are stored, sent and served."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation


def stored_dtypes(model: PreTrainedModel, runtime: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of every untied runtime tensor in a checkpoint of `dtype`, as `from_pretrained(dtype=...)` chooses it:
    integers stay, and a family may keep some weights in float32 (the correction bias of DeepSeek-V3's router)."""
    kept = model._get_dtype_plan(dtype)
    pattern = build_glob_alternation(list(kept))[0] if kept else None
    tied = set(model.get_expanded_tied_weights_keys())
    return {
        name: torch.float32
        if pattern is not None and pattern.search(name) and tensor.is_floating_point()
        else dtype
        if tensor.is_floating_point()
        else tensor.dtype
        for name, tensor in runtime.items()
        if name not in tied
    }
