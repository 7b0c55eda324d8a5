"""What a person sees while a run goes on: a live bar on a terminal, a plain line now and then in a log file."""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as LiveDisplay
from rich.table import Column, Table

SECONDS_BETWEEN_LINES = 2.0
SECONDS_OF_SILENCE = 60.0
"""After this long without a finished step it says where the step under way is; then after twice as long, and so on."""
_SECONDS_BETWEEN_LOOKS = 5.0
LOG_FILE_COLUMNS = 120


class Progress:
    """The progress of one loop. A context manager.

    On a terminal a bar with the step, the time left and the newest metrics. Elsewhere plain lines, at most one every
    `SECONDS_BETWEEN_LINES`, and always one for the last step.

    Example:
        with Progress("sft", 100) as progress:
            progress.update(1, {"train/loss": 1.23})
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        *,
        start_step: int = 0,
        doing: Callable[[], str] = lambda: "",
        stream: TextIO | None = None,
    ) -> None:
        """
        Args:
            total_steps: the number of the last step.
            start_step: steps that were done before, by the run that this one resumes.
            doing: names what the step under way is doing; called from another thread.
            stream: where to write; None is standard output.
        """
        self._title = title
        self._total_steps = total_steps
        self._start_step = start_step
        self._doing = doing
        self._stream = stream or sys.stdout
        self._start = time.monotonic()
        self._last_line = float("-inf")
        self._shown_step: int | None = None
        self._newest: tuple[int, Mapping[str, float]] | None = None
        self._last_news = self._start
        self._patience = SECONDS_OF_SILENCE
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="progress", daemon=True)
        console = Console(file=self._stream)
        self._live = _live_display(console) if console.is_terminal else None
        if self._live is not None:
            self._task = self._live.add_task(title, total=total_steps, completed=start_step, metrics="")

    def __enter__(self) -> Self:
        self._start = self._last_news = time.monotonic()
        if self._live is not None:
            self._live.start()
        self._watcher.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._watcher.join()
        if self._live is not None:
            self._live.stop()
        elif self._newest is not None and self._newest[0] != self._shown_step:
            self._print_line(*self._newest)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows that `step` steps are done, with these metrics, in this order."""
        self._newest, self._last_news, self._patience = (step, metrics), time.monotonic(), SECONDS_OF_SILENCE
        if self._live is not None:
            self._live.update(self._task, completed=step, metrics=_metrics_text(metrics))
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES or step == self._total_steps:
            self._print_line(step, metrics)

    def note_silence(self) -> None:
        """Says where the step under way is, if the last one was finished long ago."""
        silence = time.monotonic() - self._last_news
        if silence < self._patience:
            return
        self._patience *= 2
        step = 1 + (self._start_step if self._newest is None else self._newest[0])
        said = f"{self._doing() or 'under way'} for {timedelta(seconds=round(silence))}"
        if self._live is not None:
            self._live.update(self._task, metrics=said)
        elif step <= self._total_steps:
            print(f"{self._title}  step {step}/{self._total_steps}  {said}", file=self._stream, flush=True)

    def _watch(self) -> None:
        """Runs in a thread of its own: looks for silence now and then."""
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            self.note_silence()

    def _print_line(self, step: int, metrics: Mapping[str, float]) -> None:
        self._last_line, self._shown_step = time.monotonic(), step
        seconds_per_step = (self._last_line - self._start) / max(step - self._start_step, 1)
        left = timedelta(seconds=round(seconds_per_step * (self._total_steps - step)))
        text = f"{self._title}  step {step}/{self._total_steps}  left {left}  {_metrics_text(metrics)}"
        print(text.rstrip(), file=self._stream, flush=True)


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, stream: TextIO | None = None
) -> None:
    """Prints a table: numbers (formatted as in `Progress`) and percentages to the right, everything else as text.

    Args:
        rows: one value per column each.
        stream: where to write; None is standard output.
    """
    console = Console(file=stream or sys.stdout, markup=False)
    if not console.is_terminal:
        console.width = LOG_FILE_COLUMNS
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        is_number = all(isinstance(row[place], int | float) or str(row[place]).endswith("%") for row in rows)
        table.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(_number_text(cell) if isinstance(cell, float) else str(cell) for cell in row))
    console.print(table)


def _live_display(console: Console) -> LiveDisplay:
    return LiveDisplay(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("left", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        # Where the terminal is narrow, the last metrics are cut off rather than the time.
        TextColumn(
            "{task.fields[metrics]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
        ),
        console=console,
        expand=True,
        # The default of 30 s gives no estimate where a step takes longer.
        speed_estimate_period=600,
    )


def _metrics_text(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {_number_text(value)}" for name, value in metrics.items())


def _number_text(value: float) -> str:
    """Writes four digits, and from 10,000 on whole numbers, because 1.234e+04 tokens/s is hard to read."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
