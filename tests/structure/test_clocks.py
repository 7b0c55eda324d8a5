"""A clock that is set, by hand or by NTP, changes no deadline: nothing in shardwise/ measures time by it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "shardwise"
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
TELL_PEOPLE = {("recipes/checkpointing/writer_lock.py", "datetime.now"), ("observability/sinks.py", "time.time")}
"""Where the time of day is written for people and never computed with."""


def wall_clocks_read(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    imported = [
        f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    names = (*calls, *imported)
    return {clock for clock in WALL_CLOCKS for name in names if name == clock or name.endswith(f".{clock}")}


def test_nothing_measures_by_a_clock_that_can_be_set():
    found = {
        (str(file.relative_to(PACKAGE)), clock)
        for file in PACKAGE.rglob("*.py")
        for clock in wall_clocks_read(file.read_text(encoding="utf-8"))
    }
    assert found == TELL_PEOPLE


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("deadline = time.time() + 5", {"time.time"}),
        ("import datetime\ndatetime.datetime.now()", {"datetime.now"}),
        ("from time import time as now\nnow()", {"time.time"}),
        ("time.monotonic(); time.sleep(1); datetime.time()", set()),
    ],
)
def test_a_clock_that_can_be_set_is_found(source, found):
    assert wall_clocks_read(source) == found
