"""AdamW with moments quantised to 8 bits in blocks of 256 (Dettmers et al. 2022), by torchao or bitsandbytes."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardwise.config import ConfigError
from shardwise.engine.shards import local_shard


def build_adamw_8bit(
    groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float, device: torch.device
) -> torch.optim.Optimizer:
    """torchao's AdamW8bit where it can be imported, else on CUDA that of bitsandbytes.

    Either sees plain tensors that alias the shards, never DTensors: bitsandbytes' kernels take none, and torchao's
    compiled one leaves weights as they were, or crashes, where dim 0 does not divide into equal shards. So the states
    are keyed by the aliases. Blocks of 256 are counted within a shard; moments of fewer than 4096 elements, and with
    torchao those that are no multiple of 256, stay float32. torchao compiles: on a CPU that takes a C++ compiler.

    Args:
        groups: each with params (float32, plain or sharded on dim 0), lr and weight_decay.
    Raises:
        ConfigError: neither package can be imported.
    """
    package = _import("torchao.optim")
    if package is None and device.type == "cuda":
        package = _import("bitsandbytes.optim")
    if package is not None:
        return on_local_shards(package.AdamW8bit, groups, lr=0.0, betas=betas, eps=eps)
    packages = "torchao or bitsandbytes" if device.type == "cuda" else "torchao"
    raise ConfigError(
        f"trainer.optimizer=adamw_8bit needs {packages} for weights on {device.type}, and cannot import it; "
        "pip install torchao, or set trainer.optimizer to adamw or adamw_cpu"
    )


def on_local_shards(
    optimizer_class: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]], **settings: Any
) -> torch.optim.Optimizer:
    """An optimizer whose parameters are plain tensors in the memory of the shards, with their gradients during a step.

    The aliases exist during a step only: an engine that moves weights off the device frees their memory, and gives them
    new memory later. Empty shards have no gradient, as a kernel may crash on nothing.
    """
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    local_groups = []
    for group in groups:
        shards = [nn.Parameter(local_shard(parameter.detach())) for parameter in group["params"]]
        pairs += zip(group["params"], shards, strict=True)
        local_groups.append({**group, "params": shards})
    optimizer = optimizer_class(local_groups, **settings)

    def alias(*_: Any) -> None:
        for parameter, shard in pairs:
            shard.data = local_shard(parameter.detach())
            if parameter.grad is not None and shard.numel():
                shard.grad = local_shard(parameter.grad)

    def release(*_: Any) -> None:
        for _parameter, shard in pairs:
            shard.data, shard.grad = shard.data.new_empty(0), None

    optimizer.register_step_pre_hook(alias)
    optimizer.register_step_post_hook(release)
    release()
    return optimizer


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
