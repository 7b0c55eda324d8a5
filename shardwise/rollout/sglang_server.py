"""The process of an SGLang server and the calls to it, over HTTP on the loopback address."""

import http.client
import importlib.util
import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.config import ConfigError, SglangRollout, TrainingError
from shardwise.processes import end_group, mapped_files, variables_of_its_own
from shardwise.rollout.own_arguments import OwnArgument, require_left_alone
from shardwise.scratch import scratch_folder

_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no server outlives its rank, however that ends
if os.getppid() != int(sys.argv[1]):
    sys.exit("the rank is gone")
os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", "--config", sys.argv[2]])
"""
_ENVIRONMENT = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
"""Makes SGLang return logprobs at the temperature of the request."""
_OTHER_NAMES = {
    "model": OwnArgument(None, "model.path"),
    **dict.fromkeys(("tensor_parallel_size", "dp_size", "data_parallel_size", "pp_size", "nnodes"), OwnArgument(1)),
}
"""Other names of arguments that are set here, and arguments that would take more than the one device of a rank."""
_NEVER_REMOVED = "/dev/shm/sglang_loads_*"
"""Shared memory in which SGLang's processes tell each other their load; the rest of the name is random."""
_HOST = "127.0.0.1"
_GLANCE_SECONDS = 5.0
"""How often the server's health is checked while a call waits for it."""
_SOCKET_SECONDS = 60.0
"""Longest time between two packets of a request or an answer."""


def check_sglang(config: SglangRollout) -> None:
    """Raises ConfigError unless SGLang can be found, as far as can be told without starting it."""
    if config.python is not None:
        if shutil.which(config.python) is None:
            raise ConfigError(f"rollout.engine.python={config.python}: there is no such program")
    elif importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            "rollout.engine=sglang: SGLang is not installed here; `pip install sglang` in an environment of its own "
            "and give its interpreter as rollout.engine.python, or use rollout.engine=embedded"
        )


class SglangServer:
    """A server process and the calls to it, with two keys made here: one for requests, one for everything else."""

    def __init__(self, config: SglangRollout, own: Mapping[str, OwnArgument]) -> None:
        """Starts the server and waits until it can generate.

        Args:
            own: arguments that config.args may not set.
        Raises:
            ConfigError: config.args sets an argument that is ours, or the server did not start; says what it printed
                last.
        """
        self.name = f"the SGLang server of rank {dist.get_rank() if dist.is_initialized() else 0}"
        self._config = config
        self._port = _free_port()
        self._key, self._admin_key = secrets.token_hex(32), secrets.token_hex(32)
        address = {"host": _HOST, "port": self._port, "api_key": self._key, "admin_api_key": self._admin_key}
        own = {**own, **{name: OwnArgument(value) for name, value in address.items()}}
        require_left_alone(config.args, own | _OTHER_NAMES)
        with ExitStack() as undone:
            folder = undone.enter_context(scratch_folder())
            self._log = folder / "log"
            # In a file in a folder of this user's alone, because everybody can read a process's command line.
            arguments = folder / "arguments.yaml"
            # By default its scheduler keeps a core of the trainer's busy even when there is no request.
            defaults = {"log_level": "warning", "sleep_on_idle": True}
            given = defaults | config.args | {name: ours.value for name, ours in own.items()}
            arguments.write_text(json.dumps({name.replace("_", "-"): value for name, value in given.items()}))
            self._process = self._launch(arguments)
            undone.callback(self._end)
            self._await_start()
            self._remove_names()
            arguments.unlink()
            self._undone = undone.pop_all()

    def generate(self, body: dict[str, Any]) -> Any:
        """Has the server generate, without a time limit while it is healthy. Raises TrainingError: it failed, died or
        was stopped."""
        return self._call("POST", "/generate", body, key=self._key, timeout_seconds=None)

    def administer(self, path: str, body: dict[str, Any]) -> None:
        """Makes a call about weights or memory. Raises as `generate`."""
        self._call("POST", path, body, key=self._admin_key, timeout_seconds=self._config.load_timeout_seconds)

    def failure(self, message: str) -> TrainingError:
        """Returns an error whose message names the server."""
        return TrainingError(f"{self.name} {message}")

    def close(self) -> None:
        """Ends the server's processes and removes its files."""
        self._undone.close()

    def _launch(self, arguments: Path) -> subprocess.Popen[bytes]:
        python = sys.executable if self._config.python is None else self._config.python
        variables = variables_of_its_own()
        variables.pop("RANK", None)
        cache = os.path.join(tempfile.gettempdir(), f"torchinductor-of-sglang-{os.getuid()}")
        variables.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        temporary = {"TMPDIR": str(arguments.parent)}  # where SGLang leaves its sockets; caches stay outside
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [python, "-c", _LAUNCH, str(os.getpid()), str(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables | _ENVIRONMENT | temporary,
                start_new_session=True,  # its own process group, which can be ended as a whole
            )

    def _await_start(self) -> None:
        deadline = time.monotonic() + self._config.load_timeout_seconds
        while not self._is_healthy(_GLANCE_SECONDS):
            if self._process.poll() is not None:
                raise ConfigError(f"rollout.engine=sglang: SGLang cannot start: {self._last_words()}")
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"rollout.engine=sglang: SGLang did not start within load_timeout_seconds="
                    f"{self._config.load_timeout_seconds:g}; raise it, if this is slow: {self._last_words()}"
                )
            time.sleep(0.2)

    def _remove_names(self) -> None:
        """Removes the names of what the server has in shared memory: its processes, once started, need them no more."""
        for file in mapped_files(self._process.pid):
            if file.match(_NEVER_REMOVED):
                file.unlink(missing_ok=True)

    def _call(self, method: str, path: str, body: Any, *, key: str, timeout_seconds: float | None) -> Any:
        """Makes an HTTP call. `timeout_seconds` None: waits for as long as the server is healthy."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=_SOCKET_SECONDS)
        deadline = time.monotonic() + (timeout_seconds or 0.0)
        try:
            connection.request(method, path, json.dumps(body), headers)
            readable = select.poll()
            readable.register(connection.sock, select.POLLIN)
            while not readable.poll(1000 * _GLANCE_SECONDS):
                if timeout_seconds is None:
                    self._require_health()
                elif time.monotonic() > deadline:
                    raise self.failure(f"did not answer {path} within load_timeout_seconds={timeout_seconds:g}")
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self.failure(f"died: {type(error).__name__}: {error}; {self._last_words()}") from error
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise self.failure(f"answered {path} with status {response.status}: {answer[:1000].decode()}")
        return json.loads(answer) if answer else None

    def _require_health(self) -> None:
        deadline = time.monotonic() + self._config.health_timeout_seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._is_healthy(left):
                return
            if self._process.poll() is not None:
                raise self.failure(f"ended with exit code {self._process.returncode}; {self._last_words()}")
            time.sleep(min(left, 0.2))
        raise self.failure(
            f"showed no sign of life for health_timeout_seconds={self._config.health_timeout_seconds:g}; "
            f"{self._last_words()}"
        )

    def _is_healthy(self, timeout_seconds: float) -> bool:
        """Whether the server can generate. SGLang answers this without a key, so none is sent."""
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=timeout_seconds)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        said = " | ".join(lines[-5:]).replace(self._key, "***").replace(self._admin_key, "***")
        return f"it printed last: {said}" if said else "it printed nothing"

    def _end(self) -> None:
        """Kills the server's processes. Asked to end, it would kill Python's resource tracker with them, which removes
        their semaphores."""
        self._remove_names()
        end_group(self._process.pid)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((_HOST, 0))
        return int(sock.getsockname()[1])
