"""AdamW with moments quantized to 8 bits in blocks of 256 (Dettmers et al. 2022), by torchao or bitsandbytes."""

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardwise.config import ConfigError
from shardwise.engine.shards import RowSharding, local_shard

BLOCK_ELEMENTS = 256
MIN_ELEMENTS = 4096
"""The smallest shard, in elements, whose moments are quantized; both packages keep those of smaller ones in float32."""
_MAPS = ("qmap", "qmap1", "qmap2")
"""Constant entries of the packages' states: tables of the numbers that the 256 codes stand for."""


def has_whole_blocks(parameter: Tensor) -> bool:
    """Whether the blocks of every rank's shard are blocks of the whole tensor, so that no number depends on how it is
    sharded, and every layout that keeps them whole has the same states. Vectors are left to float32: whether their
    shards are large enough would depend on the number of ranks.

    Args:
        parameter: plain, or sharded on dim 0.
    """
    if parameter.dim() < 2:
        return False
    sharding, row_elements = RowSharding.of(parameter), math.prod(parameter.shape[1:])
    parts = [sharding.rows(parameter.shape[0], rank) for rank in range(sharding.num_ranks)]
    step = _rows_of_whole_blocks(row_elements)
    return all(
        len(part) * row_elements >= MIN_ELEMENTS and part.start % step == 0 and part.stop % step == 0 for part in parts
    )


def build_adamw_8bit(groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """Builds torchao's AdamW8bit where it can be imported, else that of bitsandbytes.

    Both get plain tensors that alias the shards, never DTensors: bitsandbytes' kernels do not take them, and torchao's
    compiled kernel leaves weights unchanged, or crashes, where dim 0 does not divide into equal shards. So the states
    are keyed by the aliases, one for each parameter in the same order. torchao compiles, which on a CPU needs a C++
    compiler.

    Args:
        groups: each with params (float32, plain or sharded on dim 0, with whole blocks), lr and weight_decay.
    Raises:
        ConfigError: neither package can be imported.
    """
    package = _import("torchao.optim") or _import("bitsandbytes.optim")
    if package is not None:
        return on_local_shards(package.AdamW8bit, groups, lr=0.0, betas=betas, eps=eps)
    raise ConfigError(
        "trainer.optimizer=adamw_8bit needs torchao or bitsandbytes, and can import neither; pip install torchao, or "
        "set trainer.optimizer to adamw or adamw_cpu"
    )


def on_local_shards(
    optimizer_class: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]], **settings: Any
) -> torch.optim.Optimizer:
    """Builds an optimizer whose parameters are plain tensors in the memory of the shards, with their gradients during a
    step.

    The aliases exist during a step only: an engine that moves weights off the device frees their memory, and gives them
    new memory later.
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
            if parameter.grad is not None:
                shard.grad = local_shard(parameter.grad)

    def release(*_: Any) -> None:
        for _parameter, shard in pairs:
            shard.data, shard.grad = shard.data.new_empty(0), None

    optimizer.register_step_pre_hook(alias)
    optimizer.register_step_post_hook(release)
    release()
    return optimizer


def saved_states(state: Mapping[str, Any], parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields what has to be saved of a parameter's states, in the memory of the originals: codes (a byte for each
    element) and scales (a float32 for each block), both sharded like the parameter, and torchao's step counter.

    The keys are those of the package that made them, so that a state of one is not taken for a state of the other,
    whose codes may stand for other numbers.
    """
    for key, value in state.items():
        if not isinstance(value, Tensor) or key in _MAPS:
            continue
        if value.dim() == 0:
            yield key, value
        elif type(value) is Tensor:
            yield key, _as_sharded(value, parameter)
        else:
            names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]  # torch's protocol of wrapper subclasses
            for name in names:
                if name not in _MAPS:
                    yield f"{key}_{name}", _as_sharded(getattr(value, name), parameter)


def _as_sharded(local: Tensor, parameter: Tensor) -> Tensor:
    """Shards a state like its parameter: codes in the parameter's shape, scales as [groups of rows that are whole
    blocks, blocks in such a group]."""
    shape = parameter.shape
    if local.dim() == 1:
        row_elements = math.prod(shape[1:])
        step = _rows_of_whole_blocks(row_elements)
        shape = torch.Size([shape[0] // step, row_elements * step // BLOCK_ELEMENTS])
        local = local.view(-1, shape[1])
    if not isinstance(parameter, DTensor):
        return local
    form = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(parameter.device_mesh, parameter.placements, form), requires_grad=False)


def _rows_of_whole_blocks(row_elements: int) -> int:
    """The fewest rows that together are whole blocks."""
    return BLOCK_ELEMENTS // math.gcd(BLOCK_ELEMENTS, row_elements)


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
