"""The process of a rollout engine: reads calls from a socket, answers them on it, and answers health probes on another
socket.

    nothing  ->  {"result": the forms of the weights that the engine takes}, once the engine is ready
    {"method": "generate", "arguments": [requests]}  ->  {"finished": place} for each request, then {"result": ...}
    {"method": "interrupt"}  ->  nothing; a running "generate" returns what it has
    any other call  ->  {"result": ...}
    a call that fails  ->  {"error": class, "message": ..., "traceback": ...}

Messages are encoded by `codec.py`: nothing is unpickled. Weights arrive in memory that both sides have mapped.

If the engine has lost a worker, the process ends without an answer.
"""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import active_children
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor

from shardwise.checksum import checksum
from shardwise.codec import decode, encode
from shardwise.console import tell
from shardwise.ops import release_cached_blocks
from shardwise.processes import die_with, end_group_with, how_it_ended, start_resource_tracker
from shardwise.rollout.base import RolloutEngine
from shardwise.rollout.shared_weights import Form, SharedWeights, packed

_GLANCE_SECONDS = 0.01
_NOTICED_SECONDS = 0.5
"""Time within which the end of a process is noticed everywhere."""


def serve(
    build: Callable[[], RolloutEngine], commands_fd: int, probes_fd: int, lifeline_fd: int, memory_fd: int, parent: int
) -> None:
    """Serves calls until the other end of the socket closes.

    Consumes: calls. Waits for: the next one. Unblocked by: the parent closing the socket, or its death.

    Args:
        build: builds the engine.
        commands_fd, probes_fd: sockets for calls and for health probes.
        lifeline_fd: see `processes.end_group_with`.
        memory_fd: descriptor of the memory for weights.
        parent: id of the process whose child this is.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # whether the job ends is the parent's to decide
        signal.signal(number, signal.SIG_IGN)
    start_resource_tracker()
    end_group_with(lifeline_fd)
    die_with(parent)
    for descriptor in (commands_fd, probes_fd, memory_fd):
        os.set_inheritable(descriptor, False)
    commands = Connection(commands_fd)
    threading.Thread(target=_give_signs_of_life, args=(Connection(probes_fd),), daemon=True).start()
    served: _Served | None = None

    def begin() -> list[list[Any]]:
        nonlocal served
        # While the parent waits for completions, the only thing it sends is "interrupt": so poll() tells of one.
        served = _Served(build(), memory_fd, lambda place: _send(commands, {"finished": place}), commands.poll)
        return packed(served.forms)

    _send(commands, _answer(begin))
    if served is None:
        return
    workers = _Workers()
    with suppress(EOFError, ConnectionResetError):
        while True:
            message = decode(torch.frombuffer(bytearray(commands.recv_bytes()), dtype=torch.uint8))
            if message["method"] != "interrupt":  # an interrupt that comes here is late: its call has returned
                answer = _answer(partial(served.do, message["method"], message["arguments"]))
                # An error may come from a worker whose end has not been noticed yet.
                workers.require(seconds=_NOTICED_SECONDS if "error" in answer else 0)
                _send(commands, answer)


class _Served:
    """The engine and the calls that it answers."""

    def __init__(
        self,
        engine: RolloutEngine,
        memory_fd: int,
        on_finished: Callable[[int], None],
        is_interrupted: Callable[[], bool],
    ) -> None:
        self._engine, self._on_finished, self._is_interrupted = engine, on_finished, is_interrupted
        self.forms = [Form.of(name, tensor) for name, tensor in engine.served_weights()]
        self._weights = SharedWeights(self.forms, memory_fd)

    def do(self, method: str, arguments: Sequence[Any]) -> Any:
        match method:
            case "generate":
                (requests,) = arguments
                return self._engine.generate(
                    requests, on_finished=self._on_finished, is_interrupted=self._is_interrupted
                )
            case "logprobs":
                return self._engine.logprobs(*arguments)
            case "load":
                return self._engine.load_weights(self._arrived(*arguments))
            case "checksums":
                return dict(self._engine.served_checksums())
            case "commit":
                return self._engine.commit_weights(*arguments)
            case "sleep":
                self._engine.sleep()
                release_cached_blocks()  # for the rank, which has its own allocator
                return None
            case "wake":
                return self._engine.wake(*arguments)
            case "lacks_weights":
                return self._engine.lacks_weights
            case _:
                raise ValueError(f"there is no call {method!r}")

    def _arrived(self, sent: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that were sent. Those that the engine cannot read back later are verified here.

        Args:
            sent: name -> checksum, of what the memory holds now.
        """
        is_readable = {form.name: form.is_readable for form in self.forms}
        for name, expected in sent.items():
            tensor = self._weights.tensor(name)
            if not is_readable[name] and checksum(tensor) != expected:
                raise RuntimeError(
                    f"other values of {name} arrived in the process of the rollout engine than were sent"
                )
            yield name, tensor


class _Workers:
    """The processes that the engine has started. When one is gone, this process names it and ends: the engine might
    wait for it forever, or raise an error that does not name it."""

    def __init__(self) -> None:
        self._processes = active_children()
        self._watcher = threading.Thread(target=self._end_with_one, daemon=True)
        if self._processes:
            self._watcher.start()

    def require(self, *, seconds: float) -> None:
        """Returns after `seconds` if all workers still live; otherwise the process ends."""
        if self._processes and self._gone(seconds=seconds):
            self._watcher.join()  # which ends this process

    def _end_with_one(self) -> None:
        """Runs in a thread. Waits for: the end of a worker, with which it ends this process."""
        for process in self._gone(seconds=None):
            until = time.monotonic() + _NOTICED_SECONDS
            # Another thread that waited first is about to record the exit code.
            while (code := process.exitcode) is None and time.monotonic() < until:
                time.sleep(_GLANCE_SECONDS)
            tell(f"its worker {process.name} {'has ended' if code is None else how_it_ended(code)}")
        os._exit(1)

    def _gone(self, *, seconds: float | None) -> list[BaseProcess]:
        ended = wait([process.sentinel for process in self._processes], seconds)
        return [process for process in self._processes if process.sentinel in ended]


def _give_signs_of_life(probes: Connection) -> None:
    """Answers health probes. Runs in a thread, so that a busy engine does not delay it."""
    with suppress(EOFError, OSError):
        while True:
            probes.send_bytes(probes.recv_bytes())


def _answer(ask: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": ask()}
    except Exception as error:  # the parent raises it
        message = str(error.args[0]) if isinstance(error, KeyError) else str(error)
        return {"error": type(error).__name__, "message": message, "traceback": traceback.format_exc()}


def _send(commands: Connection, message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # then there is nothing more to read either
        commands.send_bytes(encode(message).numpy().data)
