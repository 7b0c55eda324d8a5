"""The parent's side of reward processes, and of the server that forks them: pipes, deadlines, how they are ended."""

import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.config import ConfigError, FunctionReward, JudgeLostError
from shardwise.processes import how_it_ended
from shardwise.rewards.output import Output, RateLimitedLog

START_SECONDS = 300.0
"""How long importing the reward functions may take; they may import torch on a busy, slow disk."""
POLL_SECONDS = 0.2
"""The longest sleep between looks at processes and deadlines."""
AHEAD_SECONDS = 0.05
"""A process gets its next jobs while it works on the current one, about as many as it does in this time: for short jobs
the round trip would cost as much as the call, and on a busy machine much more."""
MAX_AHEAD = 32
PLENTY = 8
"""A process with more jobs than this is left alone for MOMENT_SECONDS: looking at its answers one by one would take the
cores from the calls."""
MOMENT_SECONDS = 0.002
LONG_SECONDS = 0.2
"""Jobs that wait behind a call that has run longer than this are taken back: the call may hang."""
_END_SECONDS = 5.0
_READ_BYTES = 1 << 18
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Set for reward processes, whatever the ranks have: a thread pool that importing starts does not survive a fork, so
its first use in a worker would wait forever. The processes share the cores as they are."""
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class WorkerLost(Exception):
    """The process is gone or must be ended; the message says what it did, as in "did not return within 30 s"."""


class ForkServer:
    """A child that imports the reward functions, in a process group of its own, and forks the processes that call them.

    No method blocks, apart from `close`, which takes milliseconds, or half a second where what it started keeps its
    output open.
    """

    def __init__(self, functions: Sequence[FunctionReward], *, memory_bytes: int | None = None) -> None:
        """
        Args:
            memory_bytes: what each process may use beyond what importing takes; None sets no limit.
        """
        self.ready = False
        """Whether the functions are loaded."""
        self.log = RateLimitedLog(
            f"reward function {functions[0].function}" if len(functions) == 1 else "reward functions"
        )
        """The log of what this process and those it forks print."""
        self._functions = functions
        self._since = time.monotonic()
        self._unread = b""
        self._control, theirs = socket.socketpair()
        lifeline_read, self._lifeline_fd = os.pipe()
        output_read, output_write = os.pipe()
        try:
            # It starts in the folder that holds this package, so that it finds it whatever the working directory is.
            self._process = subprocess.Popen(
                # Unbuffered, so that what was printed before a death is not lost.
                [sys.executable, "-u", "-m", "shardwise.rewards.fork_server", str(theirs.fileno()), str(lifeline_read)],
                cwd=_PACKAGE_ROOT,
                env={**os.environ, **_ONE_THREAD},
                pass_fds=(theirs.fileno(), lifeline_read),
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=output_write,
                stderr=output_write,
            )
        except OSError:
            self._control.close()
            os.close(self._lifeline_fd)
            os.close(output_read)
            raise
        finally:
            theirs.close()
            os.close(lifeline_read)
            os.close(output_write)
        self._output = Output(output_read, self.log)
        entries = [{"function": entry.function, "parameters": entry.parameters} for entry in functions]
        setup = json.dumps({"folder": os.getcwd(), "functions": entries, "memory_bytes": memory_bytes}).encode()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # its end shows on the socket too
            stdin.write(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def fork(self, pipes: Sequence[int]) -> None:
        """Requests a process that reads jobs from `pipes`, answers on them and dies with them; it gets copies of them.

        Where the server is gone, so are the copies: the other sides of the pipes then see their end.
        """
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [b"f"], pipes)

    def receive(self) -> None:
        """Reads whether the functions are loaded, which sets `ready`.

        Raises:
            ConfigError: a function cannot be loaded, or the process died or hung while importing.
            JudgeLostError: the process was killed while importing.
        """
        if self.ready:
            return
        try:
            data = self._control.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if time.monotonic() - self._since > START_SECONDS:
                raise ConfigError(self._import_failure(f"did not end within {START_SECONDS:g} s")) from None
            return
        except ConnectionResetError:
            data = b""
        if not data:
            failure = self._import_failure(self._how_it_ended())
            raise (JudgeLostError if self._process.returncode == -signal.SIGKILL else ConfigError)(failure)
        self._unread += data
        if not self._unread.endswith(b"\n"):
            return
        message = json.loads(self._unread)
        if "error" in message:
            raise ConfigError(str(message["error"]))
        self.ready = True

    def close(self) -> None:
        """Ends the process, what it forked, and what importing has started."""
        if self._control.fileno() < 0:
            return
        self._control.close()
        if not self.ready or self.is_gone:  # it is in the midst of user code, or could not end what it had started
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        # A process that the kernel holds in a system call ends when that call does; nothing can hurry it.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_SECONDS)
        os.close(self._lifeline_fd)
        self._output.finish()

    def wait_targets(self) -> list[tuple[int, int]]:
        """Returns the (file descriptor, selector events) after which `receive` has something to do."""
        return [] if self.ready else [(self._control.fileno(), selectors.EVENT_READ)]

    def _how_it_ended(self) -> str:
        try:
            return how_it_ended(self._process.wait(timeout=1))
        except subprocess.TimeoutExpired:
            return "closed a socket that belongs to Shardwise"

    def _import_failure(self, reason: str) -> str:
        specs = ", ".join(entry.function for entry in self._functions)
        whose = "the function" if len(self._functions) == 1 else "one of the functions"
        return (
            f"reward.functions={specs}: importing {whose} {reason}{self._output.last_words()}; it must import in a "
            "fresh Python process"
        )


class RewardProcess:
    """A process that calls reward functions on one job after the other, in a process group of its own.

    No method blocks, apart from `kill`, which takes milliseconds, or half a second where what it started keeps its
    output.
    """

    def __init__(self, server: ForkServer, *, timeout_seconds: float, memory_bytes: int | None = None) -> None:
        """
        Args:
            memory_bytes: the server's limit on its processes, for errors.
        """
        self.jobs: deque[int] = deque()
        """Numbers of the jobs it was sent and has not answered; it works on the first."""
        self.pid: int | None = None
        """Its process id; None until it has started."""
        self._seconds_per_job = float("inf")
        # Jobs numbered in the order of sending: a job that was taken back may be sent to this process again.
        self._tickets: deque[int] = deque()
        self._next_ticket = 0
        self._taken_back: set[int] = set()
        self._timeout_seconds = timeout_seconds
        self._limit = "" if memory_bytes is None else f" under reward.memory_bytes={memory_bytes}"
        self._head_since = time.monotonic()
        self._unsent = b""
        self._unread = b""
        self._has_ended = False
        job_read, self._job_fd = os.pipe()
        self._result_fd, result_write = os.pipe()
        lifeline_read, self._lifeline_fd = os.pipe()
        output_read, output_write = os.pipe()
        theirs = (job_read, result_write, lifeline_read, output_write)
        server.fork(theirs)
        for fd in theirs:
            os.close(fd)
        os.set_blocking(self._job_fd, False)
        os.set_blocking(self._result_fd, False)
        self._output = Output(output_read, server.log)

    @property
    def ready(self) -> bool:
        """Whether it can be given jobs."""
        return self.pid is not None

    @property
    def wants_more(self) -> bool:
        """Whether it can be given a job: it has none, or few that are likely to end in a moment."""
        if not self.ready or not self.jobs:
            return self.ready
        is_quick = self._seconds_per_job * len(self.jobs) < AHEAD_SECONDS and self._head_seconds() < AHEAD_SECONDS
        return is_quick and len(self.jobs) <= MAX_AHEAD

    @property
    def has_plenty(self) -> bool:
        """Whether it has several jobs to do, so that its next answer can wait for those that follow at once."""
        return len(self.jobs) > PLENTY and self._head_seconds() < AHEAD_SECONDS

    def take_back(self) -> list[int]:
        """Takes back the jobs that wait behind a long call, in order; they may then be sent to other processes.

        If the call ends at this very moment, this process may do the first of them too; that answer is dropped.
        """
        if len(self.jobs) < 2 or self._head_seconds() < LONG_SECONDS:
            return []
        head, *waiting = self.jobs
        self.jobs = deque([head])
        while len(self._tickets) > 1:
            ticket = self._tickets.pop()
            self._taken_back.add(ticket)
            self._unsent += f'{{"skip": {ticket}}}\n'.encode()
        self._flush()
        return waiting

    def send(self, job: int, arguments: str, *, function: int = 0) -> None:
        """Sends a job, `arguments` being JSON; what the pipe does not take now goes out in `receive`.

        Args:
            function: index of the function to call.
        """
        if not self.jobs:
            self._head_since = time.monotonic()
        self.jobs.append(job)
        self._tickets.append(self._next_ticket)
        self._unsent += f'{{"job": {self._next_ticket}, "function": {function}, "arguments": {arguments}}}\n'.encode()
        self._next_ticket += 1
        self._flush()

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yields the answers that have arrived; each is to the first of `jobs`, which it removes.

        Raises:
            WorkerLost: the process died, broke the protocol, or has passed a deadline.
            ConfigError: a function cannot work on this machine.
        """
        self._flush()
        try:
            data = os.read(self._result_fd, _READ_BYTES)
        except BlockingIOError:
            self._check_deadline()
            return
        if not data:
            raise WorkerLost("ended with the process that had forked it")
        *lines, self._unread = (self._unread + data).split(b"\n")
        num_answers = 0
        for line in lines:
            if (answer := self._read_message(line)) is not None:
                num_answers += 1
                yield answer
        if num_answers:
            now = time.monotonic()
            self._seconds_per_job, self._head_since = (now - self._head_since) / num_answers, now
        self._check_deadline()

    def kill(self) -> None:
        """Ends the process and everything in its process group, and waits until it is gone.

        A process that has not started yet will end by itself: it will find its pipe of jobs at its end.
        """
        if self.pid is not None:
            if not self._has_ended:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._wait_for_end()
            self._output.finish()
        for fd in (self._job_fd, self._result_fd, self._lifeline_fd):
            os.close(fd)

    def last_words(self) -> str:
        """Returns what it printed last, to be appended to how it ended; only after `kill`."""
        return self._output.last_words()

    def _wait_for_end(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        readable = select.poll()
        readable.register(self._result_fd, select.POLLIN)
        # A process that the kernel holds in a system call ends when that call does; nothing can hurry it.
        while (seconds := deadline - time.monotonic()) > 0 and b'{"exit": ' not in self._unread:
            if readable.poll(seconds * 1000):
                data = os.read(self._result_fd, _READ_BYTES)
                if not data:
                    return
                self._unread += data

    def wait_targets(self) -> list[tuple[int, int]]:
        """Returns the (file descriptor, selector events) after which `receive` has something to do."""
        sending = [(self._job_fd, selectors.EVENT_WRITE)] if self._unsent else []
        return [(self._result_fd, selectors.EVENT_READ), *sending]

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._unsent = self._unsent[os.write(self._job_fd, self._unsent) :]
            except BlockingIOError:
                return
            except BrokenPipeError:
                # The process's end shows on the other pipe too, where the answers that it still sent come first.
                self._unsent = b""

    def _read_message(self, line: bytes) -> dict[str, Any] | None:
        try:
            message = json.loads(line)
            if "error" in message:
                raise ConfigError(str(message["error"]))
            if "ready" in message:
                self.pid = message["ready"]
                return None
            if "exit" in message:
                self._has_ended = True  # its id may belong to another process; the server has ended the group
                raise WorkerLost(how_it_ended(message["exit"]) + self._limit)
            if message["job"] in self._taken_back:
                return None
            expected = bool(self.jobs) and message["job"] == self._tickets[0]
        except (ValueError, TypeError, KeyError):
            expected = False
        if not expected:
            raise WorkerLost("wrote to a pipe that belongs to Shardwise (a fork that returned from the function?)")
        self._tickets.popleft()
        return message | {"job": self.jobs.popleft()}

    def _head_seconds(self) -> float:
        """Returns how long it has worked on the first of its jobs."""
        return time.monotonic() - self._head_since

    def _check_deadline(self) -> None:
        if self.jobs and self._head_seconds() > self._timeout_seconds:
            raise WorkerLost(f"did not return within {self._timeout_seconds:g} s")


def wait_for_any(processes: Iterable[ForkServer | RewardProcess]) -> None:
    """Sleeps until a process has an answer or takes more of a job; at most `POLL_SECONDS`, for deadlines and deaths."""
    with selectors.PollSelector() as selector:
        for process in processes:
            for fd, events in process.wait_targets():
                selector.register(fd, events)
        selector.select(POLL_SECONDS)
