"""The two ends of a medium in processes of their own, which may die; and senders and receivers without a model.

    results = run_ends(push, [pull, pull], tmp_path)      # functions at module level: function(join) -> result

Every function gets `join(medium class, **options)`, which joins the medium with this end's rank.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import fork_server

from shardwise.checksum import checksums


class Died(Exception):
    """A process ended without a result."""


def run_ends(functions: list[Callable[..., Any]], folder: Path, *, timeout_seconds: float = 60.0) -> list[Any]:
    """Runs functions[0] as the sender and the others as receivers. Returns results, or the exceptions that were raised
    (Died where a process was killed). Stopped processes are killed once the others have answered."""
    # bitsandbytes looks at the GPU as it is imported, and a process that has cannot be forked for one.
    context = multiprocessing.get_context("spawn") if torch.cuda.is_available() else fork_server()
    store = str(folder / f"store-{time.monotonic_ns()}")
    pipes = [context.Pipe() for _ in functions]
    processes = [
        context.Process(target=_run, args=(function, store, rank, len(functions), pipes[rank][1]), daemon=True)
        for rank, function in enumerate(functions)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    deadline = time.monotonic() + timeout_seconds
    try:
        return [
            _result(process, ours, deadline, rank)
            for rank, (process, (ours, _)) in enumerate(zip(processes, pipes, strict=True))
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _result(process: Any, connection: Any, deadline: float, rank: int) -> Any:
    while not connection.poll(0.05):
        if _is_stopped(process.pid):
            return Died(f"end {rank} is stopped")
        assert time.monotonic() < deadline, f"end {rank} did not answer in time"
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        process.join(10)
        return Died(f"end {rank} died with exit code {process.exitcode}")


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:  # gone since it was last heard: its pipe ends, and tells it
        return False


def _run(function: Callable[..., Any], store: str, rank: int, size: int, connection: Any) -> None:
    torch.set_num_threads(1)
    opened = dist.FileStore(store, -1)
    opened.set(f"started/{rank}", "")  # how long processes take to start is no part of any deadline

    def join(medium: Any, **options: Any) -> Any:
        opened.wait([f"started/{end}" for end in range(size)], timedelta(seconds=60))
        return medium.join(opened, rank, size, **{"timeout": timedelta(seconds=20), **options})

    try:
        result = function(join)
    except Exception as error:
        result = error
    connection.send(result)
    os._exit(0)  # as if it died here: nothing of the other end's may depend on how this one leaves


def kill_self() -> None:
    time.sleep(0.5)  # what was sent before is on its way
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self() -> None:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGSTOP)


def random_weights(seed: int, *, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Tensors smaller and larger than a bucket of 4096 bytes, of odd sizes, a scalar, an empty one, an integer one."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (57, 33), "norm": (33,), "experts": (5, 21, 33), "scalar": (), "empty": (0, 3)}
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return weights | {"counts": torch.arange(7) + seed}


class DictSender:
    """Yields a dict's tensors; `before` is called with each name before it goes."""

    def __init__(self, weights: dict[str, torch.Tensor], before: Callable[[str], None] = lambda name: None) -> None:
        self._weights, self._before = weights, before

    def named_weights(self, dtype):
        for name, tensor in self._weights.items():
            self._before(name)
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


class DictReceiver:
    """Keeps a dict's tensors; `before` is called with each name before it is copied. With `readable=False` it says what
    it has, and not which values."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        before: Callable[[str], None] = lambda name: None,
        *,
        readable: bool = True,
    ) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights.items()}
        self.version: int | None = 0
        self.loaded: list[str] = []
        self._before, self._readable = before, readable

    def load_weights(self, weights) -> None:
        self.version, self.loaded = None, []
        for name, tensor in weights:
            self._before(name)
            self.weights[name].copy_(tensor)
            self.loaded.append(name)

    def served_weights(self):
        return ((name, tensor if self._readable else tensor.to("meta")) for name, tensor in self.weights.items())

    def served_checksums(self):
        return checksums(self.served_weights())

    def commit_weights(self, version: int) -> None:
        self.version = version


def on(name: str, action: Callable[[], None]) -> Callable[[str], None]:
    """Does something before the tensor `name`."""
    return partial(_act, name, action)


def _act(wanted: str, action: Callable[[], None], name: str) -> None:
    if name == wanted:
        action()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )
