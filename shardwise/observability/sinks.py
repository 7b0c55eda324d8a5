"""The files of a run. What training computed and how long it took go to different files, so that two runs with the
same seed can be compared byte by byte."""

import errno
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Self

from shardwise.console import warn
from shardwise.durable import is_still_at, to_json

METRICS = "metrics.jsonl"
"""The file of metrics in a run's folder."""
MAX_WAITING_BYTES = 1 << 26
"""The most bytes of one log that wait in memory because they cannot be written, on a full disk say."""


class RunLog:
    """Writes the metrics of a run, step by step, flushed line by line. A context manager.

    output_dir/metrics.jsonl       {"step": 3, "train/loss": 1.25}       deterministic: the same for the same seed
    output_dir/performance.jsonl   {"step": 3, "seconds/rollout": 0.8}   timings
    output_dir/tensorboard/        events with both

    Files of an earlier run are moved aside: metrics.jsonl becomes metrics.jsonl.1, or .2 where that is taken. Those
    of a run that is resumed are continued.

    Example:
        with RunLog(Path("runs/latest"), tensorboard=False) as log:
            log.log(3, {"train/loss": 1.25}, {"seconds/rollout": 0.8})
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        tensorboard: bool,
        last_step: int | None = None,
        lengths: Mapping[str, int] = MappingProxyType({}),
        keeps_lines: bool = False,
    ) -> None:
        """
        Args:
            last_step: the step from which an earlier run goes on: lines up to it stay, later ones are cut off. None
                moves earlier files aside.
            lengths: name of a file -> its bytes up to `last_step`, as far as known: a file that has lost some gets a
                warning, and of one that has all only what comes after them is read.
            keeps_lines: whether lines that cannot be written, on a full disk say, wait in memory until they can, up to
                MAX_WAITING_BYTES a file, with a warning, as do TensorBoard's events; False raises.
        """
        output_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self._metrics, self._performance = (
                stack.enter_context(_open_lines(output_dir / name, last_step, lengths, keeps_lines=keeps_lines))
                for name in (METRICS, "performance.jsonl")
            )
            events = output_dir / "tensorboard"
            if last_step is None:
                move_aside(events)
            self._tensorboard = _Events(events, last_step, keeps_lines=keeps_lines) if tensorboard else None
            if self._tensorboard is not None:
                stack.callback(self._tensorboard.close)
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def files(self) -> list["LogFile"]:
        """The files of lines: metrics and performance."""
        return [self._metrics, self._performance]

    def log(self, step: int, metrics: Mapping[str, float], performance: Mapping[str, float]) -> None:
        """Writes one line to each file; names sorted, a value that is not finite as null. Nothing for an empty dict.

        Args:
            step: steps done; in reinforcement learning one has several optimizer steps.
            metrics: only values that the same seed reproduces.
            performance: everything that depends on the machine: seconds, rates, bytes.
        Raises:
            OSError: a file cannot be written, and lines are not kept, or too many of them are.
        """
        for lines, values in ((self._metrics, metrics), (self._performance, performance)):
            if values:
                lines.write(_as_lines({"step": step, **{name: values[name] for name in sorted(values)}}))
        if self._tensorboard is not None and (metrics or performance):
            self._tensorboard.add(step, {**metrics, **performance})

    def close(self) -> None:
        """Flushes and closes everything; a second call does nothing."""
        self._open.close()


class SampleLog:
    """output_dir/samples.jsonl: what the policy wrote and what it got for it. A context manager.

    A file of an earlier run is moved aside or continued, as in `RunLog`.

    Example: `samples.append([{"step": 3, "prompt": "2+3=", "completion": "5", "reward": 1.0, "logprobs": [-0.1]}])`
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        last_step: int | None = None,
        lengths: Mapping[str, int] = MappingProxyType({}),
        keeps_lines: bool = False,
    ) -> None:
        """Opens the file; the arguments are those of `RunLog`."""
        output_dir.mkdir(parents=True, exist_ok=True)
        self._lines = _open_lines(output_dir / "samples.jsonl", last_step, lengths, keeps_lines=keeps_lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def files(self) -> list["LogFile"]:
        return [self._lines]

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes one line per row, keys in the order of the row, and flushes once. Raises as `RunLog.log`."""
        self._lines.write(_as_lines(*rows))

    def close(self) -> None:
        self._lines.close()


def move_aside(path: Path) -> Path | None:
    """Renames a file or folder, if there is one, to the first free of path.1, path.2 and so on, which it returns. An
    empty one stays: the file of a run that ended before its first step, or a folder (or link to one) that somebody made
    for this run."""
    if not path.exists() or _is_empty(path):
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return path.rename(aside)


def _is_empty(path: Path) -> bool:
    return not any(path.iterdir()) if path.is_dir() else not path.stat().st_size


class LogFile:
    """A file that is appended to without a buffer. A context manager."""

    def __init__(self, path: Path, *, keeps_lines: bool) -> None:
        """Opens the file; `keeps_lines` is that of `RunLog`. Raises OSError."""
        self._path, self._keeps_lines = path, keeps_lines
        self._file = path.open("ab", buffering=0)  # a write says how many bytes of a line a full disk has taken
        self._num_written = self._file.tell()
        self._waiting = b""
        self._is_kept = False
        """Whether something waits because it could not be written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def num_bytes(self) -> int:
        """The length of the file, with what waits to be written."""
        return self._num_written + len(self._waiting)

    def write(self, data: bytes) -> None:
        """Appends data. Raises OSError: it cannot be written, and lines are not kept, or too many of them are."""
        self._waiting += data
        try:
            self._flush()
        except OSError as error:
            if not self._keeps_lines or len(self._waiting) > MAX_WAITING_BYTES:
                raise
            if not self._is_kept:
                self._is_kept = True
                warn(f"{self._path} cannot be written ({error}); what comes is kept in memory until it can")

    def sync(self) -> None:
        """Returns when what was written is on the disk. Any thread may call it. Raises OSError that names the file."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def close(self) -> None:
        """Writes what waits, and closes the file. Raises OSError: what waits cannot be written."""
        try:
            self._flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        if self._waiting and not is_still_at(self._file, self._path):
            raise FileNotFoundError(errno.ENOENT, "it was removed or moved while the run wrote it", str(self._path))
        while self._waiting:
            num_bytes = self._file.write(self._waiting)
            self._num_written, self._waiting = self._num_written + num_bytes, self._waiting[num_bytes:]
        self._is_kept = False


class _Events:
    """The file of TensorBoard events of this run. TensorBoard's own writer has a thread that a full disk ends, with a
    traceback on the screen, after which it takes no more events."""

    def __init__(self, folder: Path, last_step: int | None, *, keeps_lines: bool) -> None:
        # Runs without TensorBoard should not pay for its import.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = LogFile(folder / name, keeps_lines=keeps_lines)
        self._records = RecordWriter(self._file)
        self._event, self._session, self._summary = event_pb2.Event, event_pb2.SessionLog, summary_pb2.Summary
        self._write(file_version="brain.Event:2")
        if last_step is not None:  # what came later is forgotten
            self._write(step=last_step + 1, session_log=self._session(status=self._session.START))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Writes an event with these values. Raises as `RunLog.log`."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=scalars))

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


def _open_lines(path: Path, last_step: int | None, lengths: Mapping[str, int], *, keeps_lines: bool) -> LogFile:
    """Opens a file of JSON lines: a new one, or the present one to go on after the lines of `last_step`."""
    if last_step is None:
        move_aside(path)
    elif path.exists():
        _cut_after(path, last_step, lengths.get(path.name, 0))
    file = LogFile(path, keeps_lines=keeps_lines)
    if last_step is not None and (lost := lengths.get(path.name, 0) - file.num_bytes) > 0:
        warn(
            f"{path} lacks {lost:,} bytes of what was written up to step {last_step}, which the run goes on from: rows "
            "are missing in it; if you have a copy of it, stop the run and put it back"
        )
    return file


def _as_lines(*rows: Mapping[str, Any]) -> bytes:
    return "".join(to_json(row) + "\n" for row in rows).encode()


def _cut_after(path: Path, last_step: int, length: int) -> None:
    """Drops the lines of later steps, and an incomplete line just before them. What cannot be read between lines of
    earlier steps stays as it is. Reads from byte `length` on where a line up to `last_step` ends there, else all."""
    with path.open("r+b") as file:
        num_bytes = end = length if _ends_line_up_to(last_step, file, length) else 0
        file.seek(end)
        for line in file:
            end += len(line)
            step = _step_of(line)
            if step is not None and step > last_step:
                break
            if step is not None:
                num_bytes = end
        file.truncate(num_bytes)


def _ends_line_up_to(last_step: int, file: BinaryIO, end: int) -> bool:
    """Whether a whole line of `last_step`, or of a step before it, ends at this byte: those before it are of no later
    step either."""
    if not 0 < end <= file.seek(0, os.SEEK_END):
        return False
    start, tail = end, b""
    while start > 0 and b"\n" not in tail[:-1]:
        start = max(0, end - max(1 << 16, 2 * (end - start)))
        file.seek(start)
        tail = file.read(end - start)
    step = _step_of(tail[:-1].rpartition(b"\n")[2] + tail[-1:])
    return step is not None and step <= last_step


def _step_of(line: bytes) -> int | None:
    """Returns the step of a line; None where the line was not written whole."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if line.endswith(b"\n") and isinstance(step, int) else None
