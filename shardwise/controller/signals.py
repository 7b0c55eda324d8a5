"""SIGTERM, SIGINT and SIGHUP as requests to stop; callers decide how to stop."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from shardwise.controller.exit_codes import INTERRUPTED

RANK_0_VARIABLE = "SHARDWISE_RANK_0"
"""Environment variable of ranks other than 0 that `launch` started: id of the process of rank 0, which decides."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
COPIES_SECONDS = 5.0
"""How long after the first signal others count as copies of it."""


class SecondSignal:
    """Tells a second request to stop from copies of the first, where no launcher of ours counts them: torchrun sends a
    signal to every rank of its host, these pass it on to rank 0 within a second, and a scheduler may also send its own
    to all processes."""

    def __init__(self) -> None:
        self._first: float | None = None

    def has_come(self) -> bool:
        """Returns whether this signal is a second request; to be called once at each signal."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
        return now - self._first >= COPIES_SECONDS


@contextmanager
def interruptible_imports() -> Iterator[None]:
    """Inside, Ctrl-C ends this process with one line: libraries that are being imported turn a KeyboardInterrupt into
    errors of their own. A process that ignores Ctrl-C, as jobs in the background do, keeps ignoring it. To be called
    in the main thread, while there is nothing to clean up."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(interrupted()))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted() -> int:
    """Prints that Ctrl-C ended this process, except in a rank of a job, whose launcher does. Returns the exit code."""
    if "RANK" not in os.environ:
        os.write(2, b"interrupted\n")
    return INTERRUPTED


@contextmanager
def stop_signals(react: Callable[[int], None]) -> Iterator[None]:
    """Inside, STOP_SIGNALS do nothing but call `react` with their number, in a separate thread: the main thread may be
    in a collective, where Python handles no signals. SIGHUP stays ignored if it was, as under nohup. To be called in
    the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = {number: signal.signal(number, _nothing) for number in STOP_SIGNALS if number not in ignored}
    for number in before:
        signal.siginterrupt(number, False)  # system calls of libraries go on
    descriptor_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_read, args=(reader, react), name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)


def pass_on(number: int) -> None:
    """Passes a signal on to rank 0, in another rank that `launch` started; for torchrun see `Peers.pass_on`."""
    if RANK_0_VARIABLE in os.environ:
        with suppress(ProcessLookupError):
            os.kill(int(os.environ[RANK_0_VARIABLE]), number)


def _nothing(*_: object) -> None:
    """Handles a signal by doing nothing: without a handler Python writes no number to the wakeup descriptor."""


def _read(reader: int, react: Callable[[int], None]) -> None:
    while numbers := os.read(reader, 64):  # empty once the other end is closed
        for number in numbers:
            if number in STOP_SIGNALS:
                react(number)
    os.close(reader)
