import io
import time

import pytest

from shardwise.observability import Progress, print_table, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def run(clock, *, steps, total_steps, seconds_per_step, **options):
    stream = io.StringIO()
    with Progress("sft", total_steps, stream=stream, **options) as bar:
        for step in range(1, steps + 1):
            clock.now += seconds_per_step
            bar.update(step, {"train/loss": 1 / step, "tokens/s": 12345.6})
    return stream.getvalue().splitlines()


def test_a_log_file_gets_at_most_one_line_in_two_seconds_and_the_last_step(clock):
    lines = run(clock, steps=1000, total_steps=1000, seconds_per_step=0.01)
    assert lines[0] == "sft  step 1/1000  left 0:00:10  train/loss 1  tokens/s 12,346"
    assert lines[-1] == "sft  step 1000/1000  left 0:00:00  train/loss 0.001  tokens/s 12,346"
    assert 5 <= len(lines) <= 7


def test_slow_steps_get_a_line_each(clock):
    lines = run(clock, steps=3, total_steps=10, seconds_per_step=60)
    assert [line.split("  ")[1:3] for line in lines] == [
        ["step 1/10", "left 0:09:00"],
        ["step 2/10", "left 0:08:00"],
        ["step 3/10", "left 0:07:00"],
    ]


def test_a_run_that_ends_early_still_shows_its_last_step_once(clock):
    lines = run(clock, steps=5, total_steps=100, seconds_per_step=0.01)
    assert [line.split("  ")[1] for line in lines] == ["step 1/100", "step 5/100"]


def test_a_resumed_run_estimates_from_its_own_steps(clock):
    stream = io.StringIO()
    with Progress("rl", 100, start_step=90, stream=stream) as bar:
        clock.now += 10
        bar.update(91, {})
    assert stream.getvalue() == "rl  step 91/100  left 0:01:30\n"


def test_a_terminal_gets_a_live_bar_with_the_metrics(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    terminal = Terminal()
    with Progress("rl [smoke]", 4, stream=terminal) as bar:
        bar.update(3, {"reward/mean": 0.25})
    assert "rl [smoke]" in terminal.getvalue()
    assert "3/4" in terminal.getvalue()
    assert "reward/mean 0.25" in terminal.getvalue()


def test_print_table_shows_text_as_it_is_and_aligns_numbers():
    stream = io.StringIO()
    print_table(
        "accuracy [val]", ["source", "rows", "greedy"], [["sums [a]", 200, 0.5], ["b", 3, 1 / 3]], stream=stream
    )
    lines = stream.getvalue().splitlines()
    assert lines[0].strip() == "accuracy [val]"
    cells = [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines[2:3] + lines[4:6]
    ]
    assert cells == [["source", "rows", "greedy"], ["sums [a]", "200", "0.5"], ["b", "3", "0.3333"]]
    assert "│  200 │" in lines[4]


def test_print_table_aligns_percentages():
    stream = io.StringIO()
    print_table("", ["source", "greedy"], [["a", "7.1%"], ["b", "100.0%"]], stream=stream)
    assert "│   7.1% │" in stream.getvalue()


def test_a_long_step_says_where_it_is_ever_more_rarely(clock):
    stream, phases = io.StringIO(), iter(["rollout", "train", ""])
    with Progress("rl", 10, start_step=4, doing=lambda: next(phases), stream=stream) as bar:
        for _ in range(60):
            clock.now += 5
            bar.note_silence()
        assert stream.getvalue().splitlines() == [
            "rl  step 5/10  rollout for 0:01:00",
            "rl  step 5/10  train for 0:02:00",
            "rl  step 5/10  under way for 0:04:00",
        ]
        bar.update(5, {})
        clock.now += 59
        bar.note_silence()
    assert len(stream.getvalue().splitlines()) == 4


def test_the_other_thread_looks_and_ends_with_the_loop(monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(progress, "SECONDS_OF_SILENCE", 0.0)
    stream = io.StringIO()
    with Progress("rl", 10, stream=stream) as bar:
        while not stream.getvalue():
            time.sleep(0.01)
        assert bar._watcher.is_alive()
    assert not bar._watcher.is_alive()
    assert stream.getvalue().startswith("rl  step 1/10  under way for 0:00:00\n")
