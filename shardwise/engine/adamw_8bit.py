"""AdamW with moments quantised to 8 bits in blocks of 256 (Dettmers et al. 2022), by torchao or bitsandbytes."""

import importlib
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

    Both keep moments of fewer than 4096 elements in float32; torchao counts the shard, and also keeps those whose
    number of elements 256 does not divide. torchao compiles its kernel: on a CPU that takes a C++ compiler.

    Args:
        groups: each with params (float32, plain or sharded on dim 0), lr and weight_decay.
    Raises:
        ConfigError: neither package can be imported.
    """
    torchao = _import("torchao.optim")
    if torchao is not None:
        optimizer: torch.optim.Optimizer = torchao.AdamW8bit(groups, lr=0.0, betas=betas, eps=eps)
        return optimizer
    bitsandbytes = _import("bitsandbytes.optim") if device.type == "cuda" else None
    if bitsandbytes is not None:
        return _on_local_shards(bitsandbytes, groups, betas=betas, eps=eps)
    packages = "torchao or bitsandbytes" if device.type == "cuda" else "torchao"
    raise ConfigError(
        f"trainer.optimizer=adamw_8bit needs {packages} for weights on {device.type}, and cannot import it; "
        "pip install torchao, or set trainer.optimizer to adamw or adamw_cpu"
    )


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _on_local_shards(
    bitsandbytes: ModuleType, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """bitsandbytes' kernels take no DTensor: its optimizer holds parameters that alias the shards.

    The aliases are taken anew before every step, for an engine that moves weights off the device gives them new memory.
    Empty shards have no gradient: its kernels cannot be launched on nothing.
    """
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    local_groups = []
    for group in groups:
        shards = [nn.Parameter(local_shard(parameter.detach())) for parameter in group["params"]]
        pairs += zip(group["params"], shards, strict=True)
        local_groups.append({**group, "params": shards})
    optimizer: torch.optim.Optimizer = bitsandbytes.AdamW8bit(local_groups, lr=0.0, betas=betas, eps=eps)

    def alias(*_: Any) -> None:
        for parameter, shard in pairs:
            shard.data = local_shard(parameter.detach())
            gradient = None if parameter.grad is None else local_shard(parameter.grad)
            shard.grad = gradient if shard.numel() else None

    def forget(*_: Any) -> None:
        for _parameter, shard in pairs:
            shard.grad = None

    optimizer.register_step_pre_hook(alias)
    optimizer.register_step_post_hook(forget)
    return optimizer
