"""A pool of gloo ranks that outlives the tests: importing torch and transformers costs seconds, so it is paid once.

Tests reach it through the session fixture `run_ranks` of conftest.py:

    def add_rank(start):                      # at module level, so that the ranks can import it
        total = torch.tensor(start + dist.get_rank())
        dist.all_reduce(total)
        return int(total)

    def test_sum_over_ranks(run_ranks):
        assert run_ranks(add_rank, 2, 10) == [21, 21]
"""

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = [
    *("torch", "safetensors.torch", "peft", "datasets", "pytest", "shardwise.cli", "shardwise.recipes.entry"),
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"),
    "tests.conversion_rules",
]
EXIT_GRACE_SECONDS = 5.0
GROUP_TIMEOUT = timedelta(minutes=10)
"""Longer than any call may take: hung ranks are found by the pool."""


MAX_OPEN_FILES = 200
"""The meshes that calls make are torch's for good, each with connections and threads of its own: ranks that hold more
do not stay."""


def fork_server() -> Any:
    """What starts a process in which everything in PRELOAD is imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class RankError(Exception):
    """A function failed on a rank: the ranks' tracebacks, the earliest failure first."""


class RankPool:
    """Processes with one thread each, as many as a call asks for, in one process group (gloo, FileStore). They stay for
    the next call of their number, unless it would not find them as if they were new: one that failed may have left
    others in a collective."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Ranks] = {}

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 60.0
    ) -> list[Any]:
        """Calls `function(*args)` on every rank and returns the results by rank.

        Args:
            function: at module level, in a module that this process imported by its name.
            args: anything that pickles. The global torch seed is 0 at the start of every call.
            timeout_seconds: for the whole call; hung ranks are killed and their stacks reported.
        Raises:
            RankError: a rank raised, died or did not answer in time.
        """
        if world_size not in self._ranks:
            self._ranks[world_size] = _Ranks(world_size)
        return self._ranks[world_size].run(function, args, timeout_seconds)

    def close(self) -> None:
        for ranks in self._ranks.values():
            ranks.close()


class _Ranks:
    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="ranks-")
        self._calls = itertools.count()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_seconds: float) -> list[Any]:
        self._start()  # the first call waits for the ranks' imports, which are no part of its own time
        payload = pickle.dumps((function, args))
        store = str(Path(self._scratch.name) / f"store-{next(self._calls)}")
        for connection in self._connections:
            connection.send((list(sys.path), self._world_size, store, payload))
        return self._collect(timeout_seconds)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()  # ends the loop of an idle rank
        deadline = time.monotonic() + EXIT_GRACE_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()

    def _start(self) -> None:
        if self._processes:
            return
        context = fork_server()
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, theirs, str(self._stack_file(rank))), daemon=True, name=f"rank{rank}"
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        for connection in self._connections:
            assert connection.poll(120), "the ranks did not start within 120 s"
            connection.recv()

    def _stack_file(self, rank: int) -> Path:
        return Path(self._scratch.name) / f"stack-{rank}"

    def _collect(self, timeout_seconds: float) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        rank_of = {connection: rank for rank, connection in enumerate(self._connections)}
        results: dict[int, Any] = {}
        failures: list[str] = []
        can_stay = True
        while rank_of:
            ready = wait(list(rank_of), max(0.0, deadline - time.monotonic()))
            if not ready:
                hung, can_stay = sorted(rank_of.values()), False
                failures += [
                    f"rank {rank} did not answer within {timeout_seconds} s:\n{self._stack(rank)}" for rank in hung
                ]
                break
            for connection in ready:
                rank = rank_of.pop(connection)
                try:
                    succeeded, value, is_as_new = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    can_stay = False
                    self._processes[rank].join(EXIT_GRACE_SECONDS)
                    failures.append(f"rank {rank} died with exit code {self._processes[rank].exitcode}")
                    # Its peers notice the closed connections; those that wait for something else are not worth it.
                    deadline = min(deadline, time.monotonic() + EXIT_GRACE_SECONDS)
                    continue
                can_stay &= is_as_new
                if succeeded:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank} raised:\n{value}")
        if not can_stay:
            self._end()
        if failures:
            raise RankError("\n".join(failures))
        return [results[rank] for rank in range(self._world_size)]

    def _stack(self, rank: int) -> str:
        """Where every thread of a rank is right now."""
        file = self._stack_file(rank)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not file.stat().st_size:
            time.sleep(0.05)
        time.sleep(0.1)
        return file.read_text()


_call_file = ""


def call_store() -> Any:
    """On a rank: a store that nobody has written to before this call, unlike that of the process group."""
    import torch.distributed as dist

    return dist.FileStore(_call_file, dist.get_world_size())


def _serve(rank: int, connection: Connection, stack_file: str) -> None:
    """A rank: consumes calls, sends results, returns when the pool closes its end."""
    import torch

    torch.set_num_threads(1)
    # A rank that is done may leave: without a barrier the others could still be connecting to it.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    with open(stack_file, "w") as stacks, contextlib.suppress(EOFError, OSError):
        gc.freeze()
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        connection.send("ready")
        while True:
            path, world_size, store, payload = connection.recv()
            sys.path[:] = path
            succeeded, answer = _call(rank, world_size, store, payload)
            connection.send_bytes(answer)
            if not succeeded and world_size > 1:
                os._exit(1)  # frees the peers from their collectives, also where a cache of meshes holds the groups


def _call(rank: int, world_size: int, store: str, payload: bytes) -> tuple[bool, bytes]:
    import torch
    import torch.distributed as dist

    global _call_file
    _call_file = f"{store}-call"
    try:
        function, args = pickle.loads(payload)
        torch.manual_seed(0)
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
            )
        value = function(*args)
        return True, pickle.dumps((True, value, _is_as_new(world_size)))
    except BaseException:
        return False, pickle.dumps((False, traceback.format_exc(), world_size == 1 and _is_as_new(world_size)))
    finally:
        gc.collect()  # engines are cycles; their groups and buffers should not outlive the call


def _is_as_new(world_size: int) -> bool:
    """Whether this rank may serve another call. DTensor remembers what it did by a mesh's shape and ranks: a 2 x 2 mesh
    of a later call would get the groups of an earlier one."""
    from torch.distributed.distributed_c10d import _world

    are_whole = all(len(ranks) == world_size for ranks in _world.pg_group_ranks.values())
    return (world_size <= 2 or are_whole) and len(os.listdir("/proc/self/fd")) <= MAX_OPEN_FILES
