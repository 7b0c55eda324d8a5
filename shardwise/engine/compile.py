"""Faster layers, as options: torch.compile and the Triton kernels of liger-kernel."""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.config import ConfigError


def compile_layers(model: nn.Module, paths: Sequence[str]) -> None:
    """Compiles the layers at `paths` in place, before wrappers and FSDP hooks go around them."""
    for path in paths:
        model.get_submodule(path).compile(dynamic=True)


def use_liger_kernels(model: PreTrainedModel, device: torch.device) -> None:
    """Swaps norms, rotary embedding and SwiGLU for liger-kernel's; logprobs stay ours.

    Raises:
        ConfigError: no CUDA device, the package is not installed, or it has no kernels for the family, which it would
            only log.
    """
    if device.type != "cuda":
        raise ConfigError(f"engine.use_liger_kernels=true needs a CUDA device, and this rank runs on {device.type}")
    from transformers.integrations.liger import apply_liger_kernel  # imports peft, which takes a second

    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as families
    except ImportError:
        raise ConfigError(
            "engine.use_liger_kernels=true needs the package liger-kernel, which is not installed"
        ) from None
    if model.config.model_type not in families:
        raise ConfigError(
            f"engine.use_liger_kernels=true: liger-kernel has no kernels for {model.config.model_type}; it has them "
            f"for {', '.join(sorted(families))}"
        )
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
