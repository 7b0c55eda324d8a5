"""Who this process is among the ranks, and the process groups they talk over."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch.distributed as dist

from shardwise.controller.launch import STORE_VARIABLE

_CONTROL_TIMEOUT = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Rank:
    """This process, as torchrun's or `launch`'s environment variables tell."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> Self:
        """One process alone is rank 0 of 1."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        return cls(*(int(os.environ.get(name, default)) for name, default in zip(names, ("0", "1", "0"), strict=True)))


def backend_of(device_type: str) -> str:
    """gloo for what lies on the host, and torch's default backend for tensors on the accelerator."""
    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


@contextmanager
def process_group(rank: Rank, *, device_type: str, timeout_seconds: int) -> Iterator[dist.ProcessGroup]:
    """Joins the default process group (gloo; beside it the accelerator's own) and leaves it at the end.

    Args:
        device_type: where the model lives, such as "cpu"; a build of torch may know NCCL on a machine without a GPU.
        timeout_seconds: how long a collective of the model may wait for a rank.
    Raises:
        RuntimeError: another rank did not come in time.
    Yields:
        A second gloo group for commands. A rank may wait in it as long as the others are at work elsewhere; a rank that
        dies closes its connections, which ends the wait.
    """
    if rank.world_size == 1:
        store: dist.Store | None = dist.HashStore()
    elif STORE_VARIABLE in os.environ:
        store = dist.FileStore(os.environ[STORE_VARIABLE], rank.world_size)
    else:
        store = None  # torchrun: MASTER_ADDR and MASTER_PORT
    try:
        dist.init_process_group(
            backend_of(device_type),
            store=store,
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except RuntimeError as error:  # such as "Wait timeout", which names nobody
        raise RuntimeError(
            f"rank {rank.rank} could not join the other ranks of {rank.world_size} within {timeout_seconds} s: {error}"
        ) from error
    try:
        yield dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT)
    finally:
        dist.destroy_process_group()
