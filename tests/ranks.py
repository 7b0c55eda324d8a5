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
    *("torch", "safetensors.torch", "peft", "datasets", "shardwise.cli", "shardwise.recipes.entry"),
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"),
]
EXIT_GRACE_SECONDS = 5.0


def fork_server() -> Any:
    """What starts a process in which everything in PRELOAD is imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class RankError(Exception):
    """A function failed on a rank: the ranks' tracebacks, the earliest failure first."""


class RankPool:
    """Up to `size` processes with one thread each. A call runs on the first `world_size` of them in a process group of
    its own (gloo, FileStore), so neither a failure nor another world size leaves anything behind for the next call."""

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="ranks-")
        self._calls = itertools.count()

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 60.0
    ) -> list[Any]:
        """Calls `function(*args)` on every rank and returns the results by rank.

        Args:
            function: at module level, in a module that this process imported by its name.
            args: anything that pickles. The global torch seed is 0 at the start of every call.
            timeout_seconds: for the whole call; hung ranks are killed and their stacks reported.
        Raises:
            RankError: a rank raised, died or did not answer in time. Ranks that died or hung are replaced.
        """
        assert 1 <= world_size <= self._size, f"world_size={world_size}, the pool has {self._size} ranks"
        self._start()  # the first call waits for the ranks' imports, which are no part of its own time
        payload = pickle.dumps((function, args))
        store = str(Path(self._scratch.name) / f"store-{next(self._calls)}")
        for connection in self._connections[:world_size]:
            connection.send((list(sys.path), world_size, store, timeout_seconds, payload))
        try:
            return self._collect(world_size, timeout_seconds)
        finally:
            # torch caches meshes by their shape and ranks: a 2 x 2 mesh of a later call would get the groups of an
            # earlier one, which are gone. Fresh processes are cheap, for the fork server has imported everything.
            if world_size > 2:
                self._end()

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
        for rank in range(self._size):
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

    def _collect(self, world_size: int, timeout_seconds: float) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        rank_of = {connection: rank for rank, connection in enumerate(self._connections[:world_size])}
        results: dict[int, Any] = {}
        failures: list[str] = []
        lost = False
        while rank_of:
            ready = wait(list(rank_of), max(0.0, deadline - time.monotonic()))
            if not ready:
                hung = sorted(rank_of.values())
                failures += [
                    f"rank {rank} did not answer within {timeout_seconds} s:\n{self._stack(rank)}" for rank in hung
                ]
                lost = True
                break
            for connection in ready:
                rank = rank_of.pop(connection)
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(EXIT_GRACE_SECONDS)
                    failures.append(f"rank {rank} died with exit code {self._processes[rank].exitcode}")
                    lost = True
                    # Its peers notice the closed connections; those that wait for something else are not worth it.
                    deadline = min(deadline, time.monotonic() + EXIT_GRACE_SECONDS)
                    continue
                if succeeded:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank} raised:\n{value}")
        if lost:
            self._end()
        if failures:
            raise RankError("\n".join(failures))
        return [results[rank] for rank in range(world_size)]

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


def _serve(rank: int, connection: Connection, stack_file: str) -> None:
    """A rank: consumes calls, sends results, returns when the pool closes its end."""
    import torch

    torch.set_num_threads(1)
    # A rank that is done may leave: without a barrier the others could still be connecting to it.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    with open(stack_file, "w") as stacks, contextlib.suppress(EOFError, OSError):
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        connection.send("ready")
        while True:
            path, world_size, store, timeout_seconds, payload = connection.recv()
            sys.path[:] = path
            connection.send_bytes(_call(rank, world_size, store, timeout_seconds, payload))


def _call(rank: int, world_size: int, store: str, timeout_seconds: float, payload: bytes) -> bytes:
    import torch
    import torch.distributed as dist

    try:
        function, args = pickle.loads(payload)
        torch.manual_seed(0)
        timeout = timedelta(seconds=timeout_seconds)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timeout
        )
        try:
            return pickle.dumps((True, function(*args)))
        finally:
            # Also after an error: it closes the connections, which frees the peers from their collectives.
            dist.destroy_process_group()
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
