"""Applies a function to the rows of data files, with the help of other processes where one alone would take long."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from shardwise.console import warn
from shardwise.data.sources import Row
from shardwise.processes import variables_of_its_own

T = TypeVar("T")

MAX_WORKERS = 32
"""The most processes where their number is not set: this one can take what so many return."""
MEASURED_SECONDS = 1.0
"""This process works so long before it says how long the rest will take."""
WORTH_SECONDS = 10.0
"""Processes are started where the rest would take this one longer: they need some seconds to start."""
CHUNK_ROWS, CHUNK_SECONDS = 64, 0.25
"""The most rows that a process is given at a time, and about how long it may work on them."""
PATIENCE_SECONDS = 60.0
"""A process that has not returned its rows for so long is given up."""
_END_SECONDS = 5.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_GREETING = -1
"""In place of the number of a chunk: the process has yet to say that it is there."""
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def nothing() -> None:
    """What happens at every row unless a caller says more."""


def map_rows(
    function: Callable[[Row], T],
    rows: Sequence[Row],
    *,
    num_workers: int | None,
    on_row: Callable[[], object] = nothing,
) -> Iterator[T]:
    """Yields `function(row)` for every row, in their order.

    This process begins. Once it knows that the rest will take it long it starts others, and goes on until they are
    there. Rows that they do not return, because the function raises, or they are killed or hang, it does itself, so
    that the first row that fails raises here, as it would without them.

    Args:
        function: its result depends on the row alone. Others call a pickled copy; one that cannot be pickled is called
            here alone.
        num_workers: the most processes to start; None: one for every core that this process may use, but none for one.
        on_row: called for each row when its turn comes.
    """
    if num_workers is None:
        num_cores = len(os.sched_getaffinity(0))
        num_workers = min(num_cores, MAX_WORKERS) if num_cores > 1 else 0
    processes: _RowProcesses | None = None
    seconds = 0.0
    try:
        for index, row in enumerate(rows):
            if processes is not None and processes.are_there():
                chunk_rows = min(CHUNK_ROWS, max(1, int(CHUNK_SECONDS * index / seconds)))
                yield from processes.map(function, rows[index:], chunk_rows, on_row)
                return
            on_row()
            began = time.perf_counter()
            outcome = function(row)
            seconds += time.perf_counter() - began
            yield outcome
            seconds_left = seconds / (index + 1) * (len(rows) - index - 1)
            if num_workers and seconds > MEASURED_SECONDS and seconds_left > WORTH_SECONDS:
                processes = _start(function, num_workers)
                num_workers = 0
    finally:
        if processes is not None:
            processes.close()


def _start(function: Callable[[Row], object], num_workers: int) -> "_RowProcesses | None":
    """Begins to start processes; None where there can be none."""
    try:
        pickled = pickle.dumps(function)
    except Exception:  # a tokenizer of the user's own, in which anything may be; those of tokenizers raise just this
        return None
    try:
        return _RowProcesses(pickled, num_workers)
    except OSError as error:
        warn(f"no processes can be started to turn rows into tokens ({error}); this one does it alone")
        return None


class _RowProcesses:
    """Processes that apply one function to rows, and end when the thread that has started them does."""

    def __init__(self, function: bytes, num_workers: int) -> None:
        """Begins to start them.

        Args:
            function: pickled.
        Raises:
            OSError: there are no more processes or files to be had.
        """
        self._idle: list[Connection] = []
        self._working: dict[Connection, int] = {}
        """Connection to a process -> the number of the chunk that it works on."""
        self._since: dict[Connection, float] = {}
        """Connection to a process -> when it was given it."""
        self._answers: dict[int, dict[int, Any]] = {}
        """Number of a chunk -> the outcome for each of its rows, by place; without those whose function raised."""
        self._has_lost = False
        with ExitStack() as theirs, ExitStack() as ours:
            passed = []
            for _ in range(num_workers):
                connection, other = Pipe()
                self._working[ours.enter_context(connection)] = _GREETING
                passed.append(theirs.enter_context(other).fileno())
            setup = theirs.enter_context(tempfile.TemporaryFile())  # a pipe would hold this process up
            setup.write(function)
            setup.seek(0)
            self._server = subprocess.Popen(
                [
                    *(sys.executable, "-m", "shardwise.data.row_server", os.getcwd(), str(os.getpid())),
                    *map(str, passed),
                ],
                cwd=_PACKAGE_ROOT,  # where it finds this package, whatever the working directory is
                env=variables_of_its_own() | _ONE_THREAD,
                pass_fds=passed,
                start_new_session=True,
                stdin=setup,
                stdout=subprocess.DEVNULL,
            )
            ours.pop_all()

    def are_there(self) -> bool:
        """Returns whether one of them can be given rows."""
        self._receive(timeout=0.0)
        return bool(self._idle)

    def map(
        self, function: Callable[[Row], T], rows: Sequence[Row], chunk_rows: int, on_row: Callable[[], object]
    ) -> Iterator[T]:
        """Yields `function(row)` for every row, in their order; processes are given `chunk_rows` at a time."""
        chunks = [rows[begin : begin + chunk_rows] for begin in range(0, len(rows), chunk_rows)]
        waiting = deque(enumerate(chunks))
        for number, chunk in enumerate(chunks):
            self._receive(timeout=0.0)
            self._send(waiting)
            while number in self._working.values():
                self._receive(timeout=1.0)
                self._give_up(number)
                self._send(waiting)
            if waiting and waiting[0][0] == number:  # nobody is there to take it
                waiting.popleft()
            outcomes = self._answers.pop(number, {})
            for place, row in enumerate(chunk):
                on_row()
                yield outcomes[place] if place in outcomes else function(row)

    def close(self) -> None:
        """Ends them."""
        os.killpg(self._server.pid, signal.SIGKILL)
        # One that the kernel holds in a system call ends when that call does; nothing can hurry it.
        with suppress(subprocess.TimeoutExpired):
            self._server.wait(timeout=_END_SECONDS)
        for connection in (*self._idle, *self._working):
            connection.close()

    def _send(self, waiting: deque[tuple[int, Sequence[Row]]]) -> None:
        """Gives every process that has nothing to do the next chunk. One that cannot be pickled is left to this
        process."""
        while self._idle and waiting:
            number, chunk = waiting.popleft()
            try:
                pickled = pickle.dumps(chunk)
            except Exception:  # cells nest deeper than Python calls, or are of any type
                continue
            connection = self._idle.pop()
            try:
                connection.send_bytes(pickled)
            except OSError:
                self._lose(connection, number)
            else:
                self._working[connection], self._since[connection] = number, time.monotonic()

    def _receive(self, timeout: float) -> None:
        """Takes what the processes have returned; waits for it for at most `timeout` seconds."""
        for connection in wait(list(self._working), timeout):
            assert isinstance(connection, Connection)
            number = self._working.pop(connection)
            try:
                answer = connection.recv_bytes()
            except (EOFError, OSError):
                self._lose(connection, number)
                continue
            if number != _GREETING:
                self._answers[number] = pickle.loads(answer)
            self._idle.append(connection)

    def _give_up(self, number: int) -> None:
        """Does without the process that has a chunk if it has had it for too long."""
        for connection, theirs in list(self._working.items()):
            if theirs == number and time.monotonic() - self._since[connection] > PATIENCE_SECONDS:
                del self._working[connection]
                self._lose(connection, number)

    def _lose(self, connection: Connection, number: int) -> None:
        connection.close()
        if not self._has_lost:
            how = "could not start" if number == _GREETING else "has ended (out of memory?) or hangs"
            warn(
                f"a process that turns rows into tokens {how}; those that are there and this one go on; "
                "data.preprocessing_num_workers sets how many there are"
            )
        self._has_lost = True
