"""The layout of the ranks: dp_replicate x dp_shard x sp."""

from dataclasses import dataclass
from typing import Self

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.config import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """How many ranks each axis has; the product is the world size.

    Example: 8 ranks with fsdp_size=4: dp_replicate=2, dp_shard=4, sp=1 (HSDP: two replicas, each sharded over four).
    """

    dp_replicate: int
    dp_shard: int
    sp: int

    @classmethod
    def from_sizes(cls, *, world_size: int, fsdp_size: int | None, ulysses_size: int) -> Self:
        """Checks the sizes a user gave.

        Raises:
            ConfigError: the sizes do not divide the world size; lists the ones that do.
        """
        if ulysses_size != 1:
            raise ConfigError(f"engine.ulysses_size={ulysses_size}: sequence parallelism is not in this version; use 1")
        size = world_size if fsdp_size is None else fsdp_size
        if world_size % size:
            divisors = [str(d) for d in range(1, world_size + 1) if world_size % d == 0]
            allowed = divisors[0] if len(divisors) == 1 else f"{', '.join(divisors[:-1])} or {divisors[-1]}"
            raise ConfigError(
                f"engine.fsdp_size={size} does not divide the world size {world_size}; "
                f"use {allowed} ({world_size} = shard over all ranks)"
            )
        return cls(world_size // size, size, 1)

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh fully_shard takes: one axis shards; with a second, smaller copies are replicated (HSDP)."""
        if self.dp_replicate == 1:
            return init_device_mesh(device_type, (self.dp_shard,), mesh_dim_names=("dp_shard",))
        return init_device_mesh(
            device_type, (self.dp_replicate, self.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
        )


def take_device(local_rank: int) -> torch.device:
    """This rank's accelerator, made the current one, or the CPU where there is none.

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
    return torch.device(accelerator.type, local_rank)
