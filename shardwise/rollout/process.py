"""A rollout engine's own process, as its rank sees it: calls and answers, whether it lives, how it ended."""

import atexit
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from shardwise.codec import decode, encode
from shardwise.config import ConfigError, DataError, EngineProcessConfig, ModelError, TrainingError
from shardwise.console import listed, tell, warn
from shardwise.fault_plan import VARIABLE as FAULT_PLAN_VARIABLE
from shardwise.fault_plan import Phase, fault_point
from shardwise.processes import LastLines, end_group, how_it_ended, variables_of_its_own

POLL_SECONDS = 0.5
"""How often this side checks that the process lives. Its pipes tell at once, unless processes it has started hold them
open."""
_PROBE_SECONDS = 1.0
"""Time from the answer to a health probe to the next probe."""
_GLANCE_SECONDS = 0.05
"""How often `is_interrupted` is asked during a call."""
_END_SECONDS = 10.0
_ERRORS = {error.__name__: error for error in (ConfigError, DataError, ModelError, TrainingError)}
"""Errors of an engine that are raised again as they are on this side, by name."""
_PHASES: dict[str, Phase] = {"generate": "serve", "load": "load"}
_OF_THE_TRACKER = "ignore:resource_tracker:UserWarning"
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class ProcessLost(Exception):
    """The process ended or had to be ended. The message says why, as a predicate whose subject is the process."""


class RequestsLost(ProcessLost):
    """The process lived but finished no more requests, so it was ended."""


class EngineProcess:
    """A child process with one rollout engine, in its own session, so that signals to the job do not reach it. It ends
    when this process does.

    One call at a time. One thread starts the child, probes its health, and ends it if it does not answer; another
    passes on what it prints. So a call never waits for a child that hangs.
    """

    def __init__(
        self,
        command: Sequence[str],
        setup: str,
        *,
        environment: Mapping[str, str],
        memory_fd: int,
        config: EngineProcessConfig,
        name: str,
    ) -> None:
        """Begins to start the process; `start` waits until the engine is there.

        Args:
            command: the command line; the descriptors that `serving.serve` takes are appended to it.
            setup: what the process reads from standard input.
            memory_fd: descriptor of the memory for weights.
            name: what messages call the process.
        """
        self._config, self._name = config, name
        self._commands, their_commands = Pipe()
        self._probes, their_probes = Pipe()
        lifeline_read, self._lifeline_fd = os.pipe()
        passed = (their_commands.fileno(), their_probes.fileno(), lifeline_read, memory_fd)
        self._lock = threading.Lock()
        self._reason: str | None = None
        """Why this side has ended the process; None if it has not."""
        self._last_lines = LastLines()
        self._is_there = threading.Event()
        arguments: dict[str, Any] = {
            "args": [*command, *map(str, passed), str(os.getpid())],
            "env": environment,
            "pass_fds": passed,
            "start_new_session": True,
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        starting: Future[None] = Future()
        self._watcher = threading.Thread(
            target=self._watch, args=(arguments, starting), name="rollout engine", daemon=True
        )
        self._watcher.start()
        try:
            starting.result()
        finally:
            their_commands.close()
            their_probes.close()
            os.close(lifeline_read)
        self._printer = threading.Thread(target=self._pass_on_output, name="rollout engine's output", daemon=True)
        self._printer.start()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # if it has ended, `start` notices too
            stdin.write(setup.encode())
        atexit.register(self.close)  # without it the child would end a moment after this process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def start(self) -> Any:
        """Waits for the engine. Returns what the child reports about it; raises as `call`."""
        said = self._answer("start", [], self._config.start_timeout_seconds)
        self._is_there.set()
        return said

    def call(
        self,
        method: str,
        *arguments: Any,
        uids: Iterable[str] = (),
        on_finished: Callable[[int], None] = lambda place: None,
        is_interrupted: Callable[[], bool] | None = None,
    ) -> Any:
        """Calls a method of the engine and returns its result.

        Args:
            uids: uids of the requests among the arguments.
            on_finished: is called with the index of each request when the engine is done with it.
            is_interrupted: is polled until it returns true; the engine then returns what it has. None: never.
        Raises:
            ProcessLost: the process died, or hung and was ended. ConfigError, DataError, ModelError, TrainingError: as
                the engine raises them.
            RuntimeError: another error in the process.
        """
        self._send(method, *arguments)
        if method in _PHASES:
            fault_point(_PHASES[method], pid=self.pid)
        return self._answer(
            method,
            uids,
            self._config.request_timeout_seconds,
            on_finished=on_finished,
            is_interrupted=is_interrupted,
        )

    def close(self) -> None:
        """Ends the process and all processes that it has started."""
        atexit.unregister(self.close)
        self._end("was closed")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        for thread in (self._watcher, self._printer):
            thread.join(_END_SECONDS)
        self._commands.close()
        self._probes.close()

    def _send(self, method: str, *arguments: Any) -> None:
        try:
            self._commands.send_bytes(encode({"method": method, "arguments": list(arguments)}).numpy().data)
        except OSError:
            raise self._lost() from None

    def _answer(
        self,
        method: str,
        uids: Iterable[str],
        seconds: float,
        *,
        on_finished: Callable[[int], None] = lambda place: None,
        is_interrupted: Callable[[], bool] | None = None,
    ) -> Any:
        """Returns the answer to the last message. Every `finished` that comes before it restarts the time limit."""
        unfinished = dict(enumerate(uids))
        since = noticed = time.monotonic()
        while True:
            if is_interrupted is not None and is_interrupted():
                self._send("interrupt")
                is_interrupted = None
            try:
                message = self._received(seconds / 4 if is_interrupted is None else min(seconds / 4, _GLANCE_SECONDS))
            except (EOFError, OSError):
                raise self._lost() from None
            now = time.monotonic()
            if message is None:
                what = f"uid {listed(list(unfinished.values()))}" if unfinished else f"`{method}`"
                if now - since >= seconds:
                    self._end(f"was ended: after {now - since:.0f} s it was not done with {what}")
                    raise RequestsLost(str(self._lost()))
                if now - noticed >= seconds / 4:
                    tell(f"{self._name}: waiting for {what}, {now - since:.0f} s")
                    noticed = now
            elif "finished" in message:
                unfinished.pop(message["finished"], None)
                since = noticed = now
                on_finished(message["finished"])
            elif "error" in message:
                raise self._error(message)
            else:
                return message["result"]

    def _received(self, seconds: float) -> Any:
        """Returns the next message; None if none comes in time."""
        if not self._arrives(self._commands, seconds):
            return None
        return decode(torch.frombuffer(bytearray(self._commands.recv_bytes()), dtype=torch.uint8))

    def _arrives(self, connection: Connection, seconds: float) -> bool:
        """Whether there is something to receive in time. Raises EOFError if there is not and the process is gone."""
        deadline = time.monotonic() + seconds
        while not connection.poll(min(POLL_SECONDS, max(deadline - time.monotonic(), 0))):
            if self.is_gone and not connection.poll():
                raise EOFError
            if time.monotonic() >= deadline:
                return connection.poll()  # asked once more, because this process may have been stopped meanwhile
        return True

    def _error(self, message: dict[str, str]) -> Exception:
        if message["error"] in _ERRORS:
            return _ERRORS[message["error"]](message["message"])
        error = RuntimeError(f"{self._name}: {message['error']}: {message['message']}")
        error.add_note(message["traceback"])
        return error

    def _lost(self) -> ProcessLost:
        """Waits for the end of the process, which is about to come, and returns the error that says why it is gone."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._end("closed a pipe that belongs to Shardwise")  # counts only if it still lives
        self._printer.join(POLL_SECONDS)
        return ProcessLost(self._how_it_ended())

    def _how_it_ended(self) -> str:
        code = self._process.poll()
        reason = self._reason if self._reason is not None or code is None else how_it_ended(code)
        return f"{reason}{self._last_lines}"

    def _end(self, reason: str) -> None:
        """Ends the process, if it lives, and all processes that it has started."""
        with self._lock:
            if not self.is_gone and self._reason is None:
                self._reason = reason
            end_group(self._process.pid)
            if self._lifeline_fd >= 0:
                os.close(self._lifeline_fd)
                self._lifeline_fd = -1

    def _watch(self, arguments: dict[str, Any], starting: "Future[None]") -> None:
        """The watcher thread. It also starts the process, because the process ends with the thread that has started it.

        Waits for: answers to health probes. Unblocked by: their timeout, and the end of the process.
        """
        try:
            self._process = subprocess.Popen(**arguments)
        except OSError as error:
            starting.set_exception(error)
            return
        starting.set_result(None)
        while not self._is_there.wait(POLL_SECONDS) and not self.is_gone:
            pass
        seconds = self._config.health_timeout_seconds
        with suppress(EOFError, OSError):
            while not self.is_gone:
                self._probes.send_bytes(b"?")
                if not self._arrives(self._probes, seconds):
                    self._end(f"was ended: it did not answer a health probe within {seconds:g} s")
                    break
                self._probes.recv_bytes()
                self._arrives(self._probes, _PROBE_SECONDS)  # unasked, only the end of the process can arrive
        self._process.wait()
        if self._reason != "was closed":
            self._printer.join(POLL_SECONDS)
            warn(f"{self._name} {self._how_it_ended()}")

    def _pass_on_output(self) -> None:
        """The printer thread. Ends when no process can write to the output any more."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if text := self._last_lines.add(line):
                    with suppress(OSError):  # go on reading on a full disk: its prints would block
                        tell(text)


def environment_of(device: torch.device, *, num_devices: int = 1) -> dict[str, str]:
    """Returns the environment variables of an engine's process: without those about the job's other ranks, and with the
    rank's device as the first visible one.

    Args:
        device: the rank's.
        num_devices: number of visible devices, beginning with that one.
    Raises:
        ConfigError: there are not enough devices, or other ranks have them.
    """
    variables = variables_of_its_own()
    variables.pop(FAULT_PLAN_VARIABLE, None)
    variables["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    # The process starts in the rank's folder, for relative paths, and still has to find this package.
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    # Warnings of Python's resource tracker about shared memory would come after the last words of a lost process.
    variables["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), _OF_THE_TRACKER)))
    if device.type == "cuda":
        first = device.index or 0
        known = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        visible = known.split(",") if known else [str(index) for index in range(torch.accelerator.device_count())]
        mine = visible[first : first + num_devices]
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if num_devices > 1 and first + 1 < num_ranks:
            raise ConfigError(
                f"rollout.engine.args.tensor_parallel_size={num_devices}: an engine takes the device of its rank, "
                f"{first}, and those after it, which are those of other ranks here ({num_ranks} on this machine); let "
                "the last rank alone sample (rollout.placement={num_ranks: 1}), or leave it out"
            )
        if len(mine) < num_devices:
            raise ConfigError(
                f"rollout.engine.args.tensor_parallel_size={num_devices}: an engine takes the device of its rank, "
                f"{first}, and those after it, and this machine has {len(visible)}; lower it, or start fewer ranks on "
                "it"
            )
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    elif device.type != "cpu":
        raise ConfigError(f"rollout.engine.process: works on CUDA and CPU devices, not on {device.type}; remove it")
    return variables
