"""Reads what reward processes print, so that no print blocks, and writes it to this process's standard error."""

import select
import threading
import time
from contextlib import suppress

from shardwise.console import tell
from shardwise.processes import LastLines

MAX_LINES = 100
PERIOD_SECONDS = 60.0
"""At most MAX_LINES are written in this time: a print in every call would fill the disk in a long run."""
MAX_LINE_CHARACTERS = 500
_READ_BYTES = 1 << 16
"""The most bytes to read at a time; each piece of a line that is longer counts as a line."""
_DRAIN_SECONDS = 0.5
_GLANCE_SECONDS = 1.0


class RateLimitedLog:
    """Writes lines to standard error under one name, at most `MAX_LINES` in `PERIOD_SECONDS`, and says when it leaves
    some out. Threads may share it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._num_lines = 0

    def tell(self, line: str) -> None:
        """Writes the line, cut to `MAX_LINE_CHARACTERS`, unless the limit on lines leaves it out."""
        with self._lock:
            now = time.monotonic()
            if now - self._since >= PERIOD_SECONDS:
                self._since, self._num_lines = now, 0
            self._num_lines += 1
            if self._num_lines <= MAX_LINES:
                end = "..." if len(line) > MAX_LINE_CHARACTERS else ""
                tell(f"{self._name}: {line[:MAX_LINE_CHARACTERS]}{end}")
            elif self._num_lines == MAX_LINES + 1:
                seconds = self._since + PERIOD_SECONDS - now
                tell(
                    f"{self._name}: more than {MAX_LINES} lines; what it prints in the next {seconds:.0f} s is left out"
                )


class Output:
    """Reads what a process and its children print, in a thread of its own, whatever the other threads wait for."""

    def __init__(self, read_fd: int, log: RateLimitedLog) -> None:
        """
        Args:
            read_fd: the pipe they write to; closed when nobody can write to it any more, or soon after `finish`.
            log: gets every line.
        """
        self._log = log
        self._last_lines = LastLines()
        self._until: float | None = None
        self._thread = threading.Thread(target=self._pass_on, args=(read_fd,), name="reward output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits until what an ended process printed is passed on, but only for a moment: a process that it left behind
        may print forever, and is not read any more."""
        if self._until is None:
            self._until = time.monotonic() + _DRAIN_SECONDS
        self._thread.join(max(0.0, self._until - time.monotonic()))

    def last_words(self) -> str:
        """Returns what an ended process printed last, to be appended to how it ended; empty if it printed nothing."""
        self.finish()
        return str(self._last_lines)

    def _pass_on(self, read_fd: int) -> None:
        """Runs in the thread. Consumes: lines. Waits for: the next one. Unblocked by: the end of all processes that can
        write, or the end of the time that `finish` gives."""
        unfinished = b""
        with open(read_fd, "rb", buffering=0) as pipe:
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            while self._until is None or time.monotonic() < self._until:
                if not poll.poll(_GLANCE_SECONDS * 1000):
                    continue
                data = pipe.read(_READ_BYTES)
                if not data:
                    break
                *lines, unfinished = (unfinished + data).split(b"\n")
                if len(unfinished) >= _READ_BYTES:
                    lines, unfinished = [*lines, unfinished], b""
                for line in lines:
                    self._tell(line)
        self._tell(unfinished)

    def _tell(self, line: bytes) -> None:
        if text := self._last_lines.add(line):
            with suppress(OSError):  # a full disk is no reason to read no further: prints would fail, or wait forever
                self._log.tell(text)
