"""Activation checkpointing and offload: what a layer keeps between its forward and its backward.

Non-reentrant, and inside the FSDP unit: the backward pass has gathered the layer's weights by the time it is computed
again.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operation that is kept below
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.config import ConfigError, EngineConfig

ATTENTION_OPS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
    }
)
MATMUL_OPS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._grouped_mm.default,
    }
)


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
    kept: frozenset[Any] = frozenset()
    if config.activation_checkpointing == "selective" and config.checkpoint_every_layers is None:
        # The products of a compiled layer are inside its graphs, which are computed again as a whole.
        kept = ATTENTION_OPS if config.compile_layers else ATTENTION_OPS | MATMUL_OPS
    run = partial(_run_checkpointed, kept=kept, offload=config.activation_offload)
    for path in paths[every - 1 :: every]:
        model.set_submodule(path, checkpoint_wrapper(model.get_submodule(path), checkpoint_fn=run))


def _run_checkpointed(layer: nn.Module, *args: Any, kept: frozenset[Any], offload: bool, **kwargs: Any) -> Any:
    options: dict[str, Any] = {"use_reentrant": False}
    if kept:
        options["context_fn"] = partial(_keep_by_operation, kept)
    if not offload:
        return checkpoint(layer, *args, **options, **kwargs)
    with saved_tensors_hooks(_to_host, _to_device):  # outside of checkpoint they see the layer's inputs, nothing else
        return checkpoint(layer, *args, **options, **kwargs)


def _keep_by_operation(operations: frozenset[Any]) -> tuple["_SeesOnly", "_SeesOnly"]:
    """For a layer's forward and for computing it again: of `operations`, attention and every second matrix product is
    kept, of all results the dearest to compute for their size."""
    counts: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operation in ATTENTION_OPS:
            return CheckpointPolicy.MUST_SAVE
        counts[context.is_recompute] += 1
        is_second = counts[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if is_second else CheckpointPolicy.PREFER_RECOMPUTE

    keeps, gives_back = create_selective_checkpoint_contexts(policy)
    return _SeesOnly(keeps, operations), _SeesOnly(gives_back, operations)


class _SeesOnly(TorchDispatchMode):
    """Lets a mode see some operations and none of the others.

    Of what torch's selective checkpointing sees, the recomputation must repeat every operation as often. What FSDP does
    around a unit inside the layer is not repeated so: in backward it gathers and prefetches others.
    """

    def __init__(self, mode: TorchDispatchMode, operations: frozenset[Any]) -> None:
        super().__init__()
        self._mode = mode
        self._operations = operations

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Otherwise nothing would be compiled under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._operations:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """Copies run on the device's own stream, so that neither side waits for the other."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _to_device(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, host = packed
    return host.to(device, non_blocking=True)
