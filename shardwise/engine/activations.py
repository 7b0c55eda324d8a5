"""Activation checkpointing and offload: what a layer keeps between its forward and its backward.

Non-reentrant, and inside the FSDP unit: the backward pass has gathered the layer's weights by the time it is computed
again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.config import ConfigError, EngineConfig

ATTENTION_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}
MATMUL_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
}


def checkpoint_layers(model: nn.Module, paths: Sequence[str], config: EngineConfig) -> None:
    """Puts the layers at `paths` (or every n-th of them) into checkpoint wrappers, in place.

    Raises:
        ConfigError: the model has fewer than n layers.
    """
    if config.activation_checkpointing == "none":
        return
    every = config.checkpoint_every_layers or 1
    if every > len(paths):
        raise ConfigError(
            f"engine.checkpoint_every_layers={every} would checkpoint none of the model's {len(paths)} layers; "
            f"use at most {len(paths)}"
        )
    run = partial(_run_checkpointed, offload=config.activation_offload, by_operation=chooses_by_operation(config))
    for path in paths[every - 1 :: every]:
        model.set_submodule(path, checkpoint_wrapper(model.get_submodule(path), checkpoint_fn=run))


def chooses_by_operation(config: EngineConfig) -> bool:
    """Whether each operation of a layer is kept or computed again on its own account."""
    return config.activation_checkpointing == "selective" and config.checkpoint_every_layers is None


def _run_checkpointed(layer: nn.Module, *args: Any, offload: bool, by_operation: bool, **kwargs: Any) -> Any:
    options: dict[str, Any] = {"use_reentrant": False}
    if by_operation:
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(_keep_by_operation())
    if not offload:
        return checkpoint(layer, *args, **options, **kwargs)
    with saved_tensors_hooks(_to_host, _to_device):  # outside of checkpoint they see the layer's inputs, nothing else
        return checkpoint(layer, *args, **options, **kwargs)


def _keep_by_operation() -> Callable[..., CheckpointPolicy]:
    """Keeps attention and every second matrix product: of all results the dearest to compute for their size."""
    counts: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operation in ATTENTION_OPS:
            return CheckpointPolicy.MUST_SAVE
        if operation in MATMUL_OPS:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """Copies run on the device's own stream, so that neither side waits for the other."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _to_device(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, host = packed
    return host.to(device, non_blocking=True)
