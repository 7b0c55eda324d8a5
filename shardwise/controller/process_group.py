"""Who this process is among the ranks, and the process groups they talk over."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Self, cast

import torch.distributed as dist

from shardwise.config import ConfigError
from shardwise.controller.attempts import join_attempt
from shardwise.controller.launch import STORE_VARIABLE
from shardwise.controller.network import End, require_reachable
from shardwise.types import Connections

_CONTROL_TIMEOUT = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Rank:
    """This process among the ranks, as the environment variables of torchrun or `launch` say."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> Self:
        """Reads the variables; without them this is rank 0 of 1."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        return cls(*(int(os.environ.get(name, default)) for name, default in zip(names, ("0", "1", "0"), strict=True)))


def backend_of(device_type: str) -> str:
    """Returns gloo for tensors on the host, and torch's default backend for tensors on the accelerator."""
    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def allow_open_files() -> None:
    """Lets this process open as many files as the system lets it: a rank holds several connections to every other, and
    the usual soft limit of 1,024 is for programs that call select."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_store(rank: Rank, *, timeout_seconds: int) -> dist.Store:
    """Opens the store in which the ranks of this job leave what the others need to find them.

    Raises:
        ConfigError: the port that this job was given is taken.
        RuntimeError: another rank did not come in time.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if rank.world_size == 1:
        return dist.HashStore()
    if STORE_VARIABLE in os.environ:
        file = dist.FileStore(os.environ[STORE_VARIABLE], rank.world_size)
        file.set_timeout(timeout)
        return file
    with _joining(rank, timeout_seconds):  # torchrun: MASTER_ADDR and MASTER_PORT
        try:
            store, _, _ = next(dist.rendezvous("env://", rank.rank, rank.world_size, timeout=timeout))
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise ConfigError(
                f"MASTER_PORT={os.environ['MASTER_PORT']} is in use on this machine, perhaps by another job; give each "
                "job a port of its own (torchrun --master-port), or start this one with shardwise --nproc, which needs "
                "none"
            ) from None
        store.set_timeout(timeout)
        return join_attempt(rank.rank, rank.world_size, store, timeout_seconds=timeout_seconds)


def another_connection(store: dist.Store) -> dist.Store:
    """Returns another connection to the same store, for another thread: `store` blocks its connection while a thread
    waits on a key."""
    return cast(Any, store).clone()  # missing in torch's stubs


def connect(name: str, rank: Rank, store: dist.Store, *, timeout: timedelta) -> Connections:
    """Makes a separate gloo group of all ranks, whose messages wait for no others. `name`: the same on all ranks."""
    group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank.rank, rank.world_size, timeout)
    return cast(Connections, group)


@contextmanager
def process_group(
    rank: Rank,
    *,
    device_type: str,
    timeout_seconds: int,
    num_together: int | None = None,
    store: dist.Store | None = None,
) -> Iterator[Connections]:
    """Joins the default process group (gloo, and the accelerator's own backend beside it) and leaves it at the end.

    Args:
        device_type: where the model lives, such as "cpu"; a build of torch may know NCCL on a machine without a GPU.
        timeout_seconds: how long a collective of the model may wait for a rank.
        num_together: number of ranks, the first ones, in the default process group; the others only take commands.
            None: all of them.
        store: from `open_store`, which is called if it is None.
    Raises:
        RuntimeError: another rank did not come in time. ConfigError: on every rank, if one cannot be reached from other
            hosts.
    Yields:
        A gloo group of all ranks for commands. A rank may wait in it as long as the others work on something else; a
        rank that dies closes its connections, which ends the wait.
    """
    store = open_store(rank, timeout_seconds=timeout_seconds) if store is None else store
    try:
        with _joining(rank, timeout_seconds):
            _meet(rank, store)
            if num_together is None or rank.rank < num_together:
                dist.init_process_group(
                    backend_of(device_type),
                    store=dist.PrefixStore("together", store),
                    rank=rank.rank,
                    world_size=rank.world_size if num_together is None else num_together,
                    timeout=timedelta(seconds=timeout_seconds),
                )
        yield connect("control", rank, store, timeout=_CONTROL_TIMEOUT)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _joining(rank: Rank, timeout_seconds: int) -> Iterator[None]:
    """Adds to an error, such as "Wait timeout", which rank could not join."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank.rank} could not join the other ranks of {rank.world_size} within {timeout_seconds} s: {error}"
        ) from error


def _meet(rank: Rank, store: dist.Store) -> None:
    """Waits until every rank is there, at most as long as the store's timeout. Raises ConfigError: on every rank, if
    one cannot be reached."""
    store.set(f"present/{rank.rank}", json.dumps(asdict(End.own())))
    present = [f"present/{other}" for other in range(rank.world_size)]
    store.wait(present)
    require_reachable([End(**json.loads(end)) for end in store.multi_get(present)])
