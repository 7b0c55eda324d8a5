"""Runs an untrusted Python program: bounded, without network, and out of reach of everything else."""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.config import ConfigError
from shardwise.rewards.sandbox_child import NOBODY
from shardwise.scratch import scratch_folder

_CHILD = Path(__file__).with_name("sandbox_child.py")
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use.

    Example: `Limits(wall_seconds=2, memory_bytes=256 << 20)`
    """

    wall_seconds: float = 10.0
    """Seconds from its start to its end."""
    cpu_seconds: int = 10
    """Processor time of each process."""
    memory_bytes: int = 1 << 30
    """Address space of each process; all of them together may use num_processes times as much."""
    disk_bytes: int = 64 << 20
    """What its folder, which is in memory, may hold."""
    num_processes: int = 16
    """Processes and threads at a time."""
    num_open_files: int = 64
    """Open files of each process."""
    output_bytes: int = 1 << 20
    """Bytes of standard output, and of standard error; more ends the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended and what it printed.

    Example: `Outcome(exit_code=0, stopped=None, stdout="5\\n", stderr="")`
    """

    exit_code: int | None
    """-n after signal n; None where it was stopped."""
    stopped: Literal["time", "output"] | None
    """The limit it was ended at."""
    stdout: str
    stderr: str


def run_python(program: str, *, stdin: str = "", limits: Limits, allow_unsafe: bool = False) -> Outcome:
    """Runs `program` with the standard library, in an empty folder that vanishes with it.

    Consumes: its output. Waits for: its end. Unblocked by: its end, limits.wall_seconds or limits.output_bytes. Then
    every process it started is gone.

    Args:
        allow_unsafe: whether to run it even where protections are missing.
    Raises:
        ConfigError: a protection is missing on this machine, and allow_unsafe is false.
        RuntimeError: the sandbox itself failed.
    """
    with scratch_folder() as scratch, tempfile.TemporaryFile() as given:
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        folder = scratch / "work"
        folder.mkdir(mode=0o700)
        file = folder / "program.py"
        file.write_bytes(program.encode(errors="replace"))
        if os.geteuid() == 0:
            scratch.chmod(0o711)  # lets NOBODY through; a start removes abandoned ones only where it owns them
            os.chown(folder, NOBODY, NOBODY)
            os.chown(file, NOBODY, NOBODY)
        outcome, status = _supervise(str(folder), given.fileno(), limits, allow_unsafe)
    if "missing" in status:
        raise ConfigError(
            f"programs cannot be run in a sandbox here; what this machine lacks: {'; '.join(status['missing'])}. Allow "
            "it (in a container: user namespaces and unshare in its seccomp profile), or set the parameter "
            "allow_unsafe: true to run programs without it"
        )
    if "not_started" in status:
        raise ConfigError(f"the sandbox cannot start {sys.executable}: {status['not_started']}")
    if outcome.stopped is None and outcome.exit_code is None:
        raise RuntimeError(f"the sandbox ended without an answer: {outcome.stderr[-500:]}")
    return outcome


def _supervise(folder: str, stdin_fd: int, limits: Limits, allow_unsafe: bool) -> tuple[Outcome, dict[str, Any]]:
    settings = asdict(limits) | {"folder": folder, "allow_unsafe": allow_unsafe, "caller": os.getpid()}
    status_read, status_write = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_CHILD), json.dumps(settings), str(status_write)],
            stdin=stdin_fd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[status_write],
            start_new_session=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        )
    finally:
        os.close(status_write)
    assert process.stdout is not None
    assert process.stderr is not None
    pipes = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray(), status_read: bytearray()}
    try:
        stopped = _read_until_end(pipes, limits)
    finally:
        # Process 1 of the sandbox dies with this group, and everything in the sandbox with process 1.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()
        os.close(status_read)
    stdout, stderr, status_bytes = pipes.values()
    status = {key: value for line in status_bytes.splitlines() for key, value in json.loads(line).items()}
    outcome = Outcome(
        exit_code=None if stopped else status.get("exit_code"),
        stopped=stopped,
        stdout=stdout.decode(errors="replace"),
        stderr=stderr.decode(errors="replace"),
    )
    return outcome, status


def _read_until_end(pipes: dict[int, bytearray], limits: Limits) -> Literal["time", "output"] | None:
    """Fills the buffers until all pipes are closed; returns the limit that was met before, if any."""
    deadline = time.monotonic() + limits.wall_seconds
    with selectors.DefaultSelector() as selector:
        for fd in pipes:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            remaining = deadline - time.monotonic()
            ready = selector.select(remaining) if remaining > 0 else []
            if not ready:
                return "time"
            for key, _ in ready:
                data = os.read(key.fd, _READ_BYTES)
                if not data:
                    selector.unregister(key.fd)
                pipes[key.fd] += data[: max(0, limits.output_bytes - len(pipes[key.fd]))]
                if len(data) and len(pipes[key.fd]) >= limits.output_bytes:
                    return "output"
    return None
