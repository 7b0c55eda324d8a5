"""The layout of the ranks: dp_replicate x dp_shard x sp, and for experts dp_replicate x expert_shard x ep."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from shardwise.config import ConfigError, LayoutConfig


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """How many ranks each axis has; the product is the world size.

    Weights are sharded over dp_shard x sp together: a sequence's ranks share weights like any others. The same ranks
    are expert_shard x ep for the experts of a mixture: each of `ep` neighbors computes its part of the experts.

    Example: 8 ranks with fsdp_size=4 and ulysses_size=2: dp_replicate=2, dp_shard=2, sp=2. Ranks 0-3 hold one copy of
    the model; ranks 0 and 1 share their sequences.
    """

    dp_replicate: int
    dp_shard: int
    sp: int
    ep: int = 1

    @classmethod
    def of(cls, config: LayoutConfig, *, world_size: int) -> Self:
        """The dimensions of an engine on so many ranks. Raises ConfigError as `from_sizes`."""
        return cls.from_sizes(
            world_size=world_size,
            fsdp_size=config.fsdp_size,
            ulysses_size=config.ulysses_size,
            ep_size=config.ep_size,
        )

    @classmethod
    def from_sizes(cls, *, world_size: int, fsdp_size: int | None, ulysses_size: int, ep_size: int = 1) -> Self:
        """Checks the sizes a user gave.

        Raises:
            ConfigError: the sizes do not divide each other; lists the ones that do.
        """
        size = world_size if fsdp_size is None else fsdp_size
        if world_size % size:
            raise ConfigError(
                f"engine.fsdp_size={size} does not divide the world size {world_size}; "
                f"use {any_of(divisors(world_size))} ({world_size} = shard over all ranks)"
            )
        if size % ulysses_size:
            multiples = [d for d in divisors(world_size) if d % ulysses_size == 0]
            ways = [f"engine.ulysses_size={any_of(divisors(size))}"]
            if multiples:
                ways.append(f"engine.fsdp_size={any_of(multiples)}")
            raise ConfigError(
                f"engine.ulysses_size={ulysses_size} does not divide the {size} ranks that share one copy of the model "
                f"({'engine.fsdp_size' if fsdp_size else 'the world size'}); use {', or '.join(ways)}"
            )
        if size % ep_size:
            raise ConfigError(
                f"engine.ep_size={ep_size} does not divide the {size} ranks that share one copy of the model "
                f"({'engine.fsdp_size' if fsdp_size else 'the world size'}); use {any_of(divisors(size))}"
            )
        return cls(world_size // size, size // ulysses_size, ulysses_size, ep_size)

    def build(self, device_type: str) -> "EngineMesh":
        """Collective. Makes the process groups, or takes those of an earlier engine of the same sizes, because with
        NCCL every group has buffers of its own on the device."""
        return _build(self, device_type, dist.group.WORLD)


@dataclass(frozen=True, slots=True)
class EngineMesh:
    """The process groups of one engine, and this rank's place in them."""

    dims: ParallelDims
    fsdp: DeviceMesh
    """What fully_shard takes: (fsdp) or (dp_replicate, fsdp), fsdp being dp_shard x sp."""
    sp_group: dist.ProcessGroup | None
    """The ranks that share this rank's sequences; None where it has them alone."""
    expert_fsdp: DeviceMesh
    """What fully_shard takes for experts: `fsdp`, or (expert_shard) or (dp_replicate, expert_shard) of it."""
    ep: DeviceMesh | None
    """The ranks that share this rank's experts; None where it computes all of them."""

    @property
    def groups(self) -> set[dist.ProcessGroup]:
        """All process groups."""
        meshes = [self.fsdp, self.expert_fsdp, *([] if self.ep is None else [self.ep])]
        found = {group for mesh in meshes for group in mesh.get_all_groups()}
        return found if self.sp_group is None else found | {self.sp_group}


@lru_cache(maxsize=8)
def _build(dims: ParallelDims, device_type: str, world: dist.ProcessGroup) -> EngineMesh:
    """Cached by its arguments. `world` is among them because another default group needs other groups."""
    fsdp_size = dims.dp_shard * dims.sp
    if dims.dp_replicate == 1:
        fsdp = init_device_mesh(device_type, (fsdp_size,), mesh_dim_names=("fsdp",))
    else:
        fsdp = init_device_mesh(device_type, (dims.dp_replicate, fsdp_size), mesh_dim_names=("dp_replicate", "fsdp"))
    sp_group, expert_fsdp, ep = None, fsdp, None
    if dims.sp > 1:
        whole = fsdp._unflatten(fsdp.ndim - 1, (dims.dp_shard, dims.sp), ("dp_shard", "sp"))
        sp_group = whole.get_group("sp")
    if dims.ep > 1:
        whole = fsdp._unflatten(fsdp.ndim - 1, (fsdp_size // dims.ep, dims.ep), ("expert_shard", "ep"))
        expert_fsdp = whole["expert_shard"] if dims.dp_replicate == 1 else whole["dp_replicate", "expert_shard"]
        ep = whole["ep"]
    mesh = EngineMesh(dims, fsdp, sp_group, expert_fsdp, ep)
    for group in mesh.groups - {world}:  # made with torch's default timeout of half an hour
        _set_pg_timeout(world._get_backend(torch.device(device_type)).options._timeout, group)
    return mesh


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def any_of(numbers: Iterable[int]) -> str:
    """Returns text such as "1, 2 or 4"; a single number stands alone."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def take_device(local_rank: int) -> torch.device:
    """Makes this rank's accelerator the current one and returns it, or the CPU where there is none.

    Raises:
        ConfigError: more ranks on this machine than accelerators.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    num_devices = torch.accelerator.device_count()
    if local_rank >= num_devices:
        raise ConfigError(
            f"local rank {local_rank} has no accelerator: this machine has {num_devices}; start at most {num_devices} "
            "ranks on it (--nproc, or torchrun --nproc-per-node)"
        )
    torch.accelerator.set_device_index(local_rank)
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    if accelerator.type == "cuda":
        # torch prefers cuDNN's attention, which plans half a second for every new shape, and lengths are new all the
        # time: https://github.com/modelscope/FunASR/issues/3704.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(accelerator.type, local_rank)
