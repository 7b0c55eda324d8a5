"""Keeps a job running when its output breaks: a closed terminal, a pipe without a reader, a full disk."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast


@contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, printing to sys.stdout and sys.stderr never fails. When one of them breaks, the other gets a warning, and
    what is printed to the broken one is dropped from then on. No results are lost: the job's numbers are in files."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,  # for a stream that was closed before the job began
        redirect_stdout(cast(TextIO, _Lasting(sys.stdout or nowhere, "standard output"))),
        redirect_stderr(cast(TextIO, _Lasting(sys.stderr or nowhere, "standard error"))),
    ):
        yield


class _Lasting:
    """A text stream that drops its output once it cannot be written."""

    def __init__(self, stream: TextIO, title: str) -> None:
        self._stream = stream
        self._title = title

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Points the stream at the null device. What it still buffers goes there too: Python flushes once more when the
        process ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        other = sys.stderr if self._title == "standard output" else sys.stdout
        print(f"warning: {self._title} cannot be written to ({error.strerror}); continues without it", file=other)
