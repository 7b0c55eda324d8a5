"""A rollout engine's own process, seen by its rank: what it is sent and answers, whether it lives, how it ended."""

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
from shardwise.console import tell, warn
from shardwise.fault_plan import VARIABLE as FAULT_PLAN_VARIABLE
from shardwise.fault_plan import Phase, fault_point
from shardwise.processes import LastLines, end_group, how_it_ended, variables_of_its_own

POLL_SECONDS = 0.5
"""How often it is looked whether the process lives. Its pipes tell at once, unless what it has started holds them
open."""
_PROBE_SECONDS = 1.0
"""From the answer to a health probe to the next one."""
_GLANCE_SECONDS = 0.05
"""How often it is looked whether a call is interrupted."""
_END_SECONDS = 10.0
_NUM_SHOWN_UIDS = 3
_ERRORS = {error.__name__: error for error in (ConfigError, DataError, ModelError, TrainingError)}
"""Those of an engine that mean the same in another process."""
_PHASES: dict[str, Phase] = {"generate": "serve", "load": "load"}
_OF_THE_TRACKER = "ignore:resource_tracker:UserWarning"
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class ProcessLost(Exception):
    """The process is gone or had to go; the message says why, as what it did."""


class RequestsLost(ProcessLost):
    """It lived, and finished nothing more."""


class EngineProcess:
    """A child with one rollout engine, in a session of its own, so that signals to the job do not reach it. It ends
    when this process does.

    One call at a time. A thread starts the child, asks for signs of life, and ends it where there are none; another one
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
        """Begins to start it; `start` waits until the engine is there.

        Args:
            command: is called with the descriptors that `serving.serve` takes.
            setup: what it reads from standard input.
            memory_fd: of the memory for weights.
            name: what messages call it.
        """
        self._config, self._name = config, name
        self._commands, their_commands = Pipe()
        self._probes, their_probes = Pipe()
        lifeline_read, self._lifeline_fd = os.pipe()
        passed = (their_commands.fileno(), their_probes.fileno(), lifeline_read, memory_fd)
        self._lock = threading.Lock()
        self._reason: str | None = None
        """Why this side has ended it."""
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
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # its end shows in `start` too
            stdin.write(setup.encode())
        atexit.register(self.close)  # else it would end a moment after this process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def start(self) -> Any:
        """Waits for the engine. Returns what the child says of it; raises as `call`."""
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
        """Returns what the engine does.

        Args:
            uids: of the requests among the arguments.
            on_finished: is called with the place of each request when the engine is done with it.
            is_interrupted: is asked until it is true; the engine then returns what it has. None: it is not.
        Raises:
            ProcessLost: the process died, or hung and was ended. ConfigError, DataError, ModelError, TrainingError: as
                the engine.
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
        """Ends the process and all that it has started."""
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
        """The answer to what was sent last. Every `finished` that comes before it gives the others `seconds` more."""
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
                what = _shown(unfinished.values()) if unfinished else f"`{method}`"
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
        """The next message; None if none came in time."""
        if not self._arrives(self._commands, seconds):
            return None
        return decode(torch.frombuffer(bytearray(self._commands.recv_bytes()), dtype=torch.uint8))

    def _arrives(self, connection: Connection, seconds: float) -> bool:
        """Whether there is something to receive in time. Raises EOFError: and the process is gone."""
        deadline = time.monotonic() + seconds
        while not connection.poll(min(POLL_SECONDS, max(deadline - time.monotonic(), 0))):
            if self.is_gone and not connection.poll():
                raise EOFError
            if time.monotonic() >= deadline:
                return connection.poll()  # this process may have been stopped
        return True

    def _error(self, message: dict[str, str]) -> Exception:
        if message["error"] in _ERRORS:
            return _ERRORS[message["error"]](message["message"])
        error = RuntimeError(f"{self._name}: {message['error']}: {message['message']}")
        error.add_note(message["traceback"])
        return error

    def _lost(self) -> ProcessLost:
        """Why it is gone, which it is in a moment."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._end("closed a pipe that belongs to Shardwise")  # unless it has ended
        self._printer.join(POLL_SECONDS)
        return ProcessLost(self._how_it_ended())

    def _how_it_ended(self) -> str:
        code = self._process.poll()
        reason = self._reason if self._reason is not None or code is None else how_it_ended(code)
        return f"{reason}{self._last_lines}"

    def _end(self, reason: str) -> None:
        """Ends the process, where it lives, and what it has started."""
        with self._lock:
            if not self.is_gone and self._reason is None:
                self._reason = reason
            end_group(self._process.pid)
            if self._lifeline_fd >= 0:
                os.close(self._lifeline_fd)
                self._lifeline_fd = -1

    def _watch(self, arguments: dict[str, Any], starting: "Future[None]") -> None:
        """The thread. It starts the process too, because that ends with the thread that has started it.

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
                self._arrives(self._probes, _PROBE_SECONDS)  # nothing comes unasked but its end
        self._process.wait()
        if self._reason != "was closed":
            self._printer.join(POLL_SECONDS)
            warn(f"{self._name} {self._how_it_ended()}")

    def _pass_on_output(self) -> None:
        """The other thread. Ends when nobody can write any more."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if text := self._last_lines.add(line):
                    with suppress(OSError):  # a full disk is no reason to read no further: its prints would wait
                        tell(text)


def environment_of(device: torch.device, *, num_devices: int = 1) -> dict[str, str]:
    """The variables of an engine's process, in which nothing is said of the job's other ranks, and the device is the
    first.

    Args:
        device: of the rank.
        num_devices: so many, beginning with that one.
    Raises:
        ConfigError: there are not so many, or other ranks have them.
    """
    variables = variables_of_its_own()
    variables.pop(FAULT_PLAN_VARIABLE, None)
    variables["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    # It starts in the rank's folder, for paths that are relative, and finds this package all the same.
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    # What Python's resource tracker says of shared memory would come after the last words of those who left it.
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


def _shown(uids: Iterable[str]) -> str:
    uids = list(uids)
    shown = ", ".join(uids[:_NUM_SHOWN_UIDS])
    more = len(uids) - _NUM_SHOWN_UIDS
    return f"uid {shown}" + (f" and {more} more" if more > 0 else "")
