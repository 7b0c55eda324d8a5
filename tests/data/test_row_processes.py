"""Rows that several processes turn into tokens are those that one makes of them, whatever happens to the processes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from shardwise.config import DataError, PreferenceDataConfig, PromptDataConfig, SupervisedDataConfig
from shardwise.data import row_processes
from shardwise.data.preference import labelled_samples, preference_pairs
from shardwise.data.row_processes import CHUNK_ROWS, _RowProcesses, map_rows
from shardwise.data.rows import prompt_examples, supervised_samples
from shardwise.data.sources import Row

ROOT = Path(__file__).parents[2]
ROWS = [Row({"number": number}, f"row {number}", "rows") for number in range(3 * CHUNK_ROWS + 7)]
MARK = "SHARDWISE_ROW_PROCESSES"


@pytest.fixture
def at_once(monkeypatch):
    """Processes are started behind the first row and waited for; they find the functions of this file."""
    monkeypatch.setattr(row_processes, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(row_processes, "WORTH_SECONDS", -1.0)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "data"))))
    there = _RowProcesses.are_there

    def wait_until_there(self):
        if self._working:
            self._receive(timeout=120)
        return there(self)

    monkeypatch.setattr(_RowProcesses, "are_there", wait_until_there)


@pytest.fixture
def no_process(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a process is started")

    monkeypatch.setattr(row_processes.subprocess, "Popen", refuse)


def doubled(row):
    time.sleep(0.001)  # so that none of them could do all
    return 2 * row.values["number"], os.getpid()


def test_every_row_is_done_once_and_in_order_by_others(at_once):
    heard = []
    found = list(map_rows(doubled, ROWS, num_workers=2, on_row=lambda: heard.append(len(heard))))
    assert [number for number, _ in found] == [2 * number for number in range(len(ROWS))]
    assert len(heard) == len(ROWS)
    assert [pid == os.getpid() for _, pid in found] == [True] + [False] * (len(ROWS) - 1)
    assert len({pid for _, pid in found}) == 3


def refusing(row, refused):
    if row.values["number"] == refused:
        raise DataError(f"{row.origin}: not this one")
    return row.values["number"]


def test_the_first_row_that_cannot_be_used_raises_behind_those_before_it(at_once):
    heard = []
    with pytest.raises(DataError, match="row 150: not this one"):
        list(map_rows(partial(refusing, refused=150), ROWS, num_workers=2, on_row=lambda: heard.append(None)))
    assert len(heard) == 151


def dying(row, parent, victims):
    if os.getpid() != parent and row.values["number"] in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    return row.values["number"]


@pytest.mark.parametrize(
    "victims", [pytest.param([100], id="one"), pytest.param([20, 100, 170], id="all", marks=pytest.mark.full)]
)
def test_rows_of_a_process_that_is_killed_are_done_here(at_once, capsys, victims):
    function = partial(dying, parent=os.getpid(), victims=victims)
    assert list(map_rows(function, ROWS, num_workers=2)) == list(range(len(ROWS)))
    warning = "a process that turns rows into tokens has ended (out of memory?)"
    assert capsys.readouterr().err.count(warning) == 1


@pytest.mark.parametrize(
    ("executable", "told"), [("/bin/false", "could not start"), ("/nowhere", "no processes can be started")]
)
def test_processes_that_cannot_start_are_done_without(at_once, monkeypatch, capsys, executable, told):
    monkeypatch.setattr(row_processes.sys, "executable", executable)
    files = len(os.listdir("/proc/self/fd"))
    assert [number for number, _ in map_rows(doubled, ROWS, num_workers=2)] == [2 * n for n in range(len(ROWS))]
    assert capsys.readouterr().err.count(told) == 1
    assert len(os.listdir("/proc/self/fd")) == files


def stopping(row, parent):
    if os.getpid() != parent and row.values["number"] == 100:
        os.kill(os.getpid(), signal.SIGSTOP)
    return row.values["number"]


@pytest.mark.full
def test_rows_of_a_process_that_hangs_are_done_here_and_it_is_ended(at_once, monkeypatch, capsys):
    monkeypatch.setattr(row_processes, "PATIENCE_SECONDS", 2.0)
    function = partial(stopping, parent=os.getpid())
    assert list(map_rows(function, ROWS, num_workers=2)) == list(range(len(ROWS)))
    assert capsys.readouterr().err.count("has ended (out of memory?) or hangs") == 1


@pytest.mark.full
def test_rows_that_cannot_be_pickled_are_done_here(at_once):
    deep = []
    for _ in range(5000):
        deep = [deep]
    rows = [*ROWS[:100], Row({"number": 100, "unused": deep}, "row 100", "rows"), *ROWS[101:]]
    found = list(map_rows(doubled, rows, num_workers=2))
    assert [number for number, _ in found] == [2 * number for number in range(len(ROWS))]
    assert len({pid for _, pid in found}) > 1


def origin_of(_, row):
    return row.origin


class Unnamed:
    """As tokenizers raise it of what is no part of a file."""

    def __reduce__(self):
        raise Exception("Custom PreTokenizer cannot be serialized")


@pytest.mark.parametrize("num_workers", [0, None])
def test_none_are_started_where_none_are_wanted_or_there_is_one_core(at_once, no_process, monkeypatch, num_workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert len(list(map_rows(doubled, ROWS, num_workers=num_workers))) == len(ROWS)


def test_none_are_started_for_what_takes_a_moment(no_process):
    numbers = list(map_rows(partial(refusing, refused=None), ROWS * 100, num_workers=2))
    assert numbers == list(range(len(ROWS))) * 100


def test_a_function_that_cannot_be_pickled_is_called_here(at_once, no_process):
    assert list(map_rows(lambda row: row.origin, ROWS, num_workers=2)) == [row.origin for row in ROWS]
    function = partial(origin_of, Unnamed())
    assert list(map_rows(function, ROWS, num_workers=2)) == [row.origin for row in ROWS]


@pytest.mark.parametrize(("num_cores", "expected"), [(2, 2), (8, 8), (100, 32)])
def test_there_is_one_for_every_core_unless_their_number_is_set(at_once, monkeypatch, num_cores, expected):
    started = []

    def note(_function, num_workers):
        started.append(num_workers)
        raise OSError("enough")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(row_processes, "_RowProcesses", note)
    assert len(list(map_rows(doubled, ROWS, num_workers=None))) == len(ROWS)
    assert started == [expected]


def test_they_are_started_where_the_rest_would_take_long(monkeypatch):
    """A clock that goes on by a tenth of a second with every row: 1.1 s are measured behind the eleventh."""
    seconds = iter(n / 10 for half in range(10_000) for n in (half, half + 1))
    monkeypatch.setattr(row_processes.time, "perf_counter", lambda: next(seconds))
    started = []
    monkeypatch.setattr(row_processes, "_start", lambda *_: started.append(len(done)))
    for num_rows, expected in ((100, []), (120, [11])):
        done = []
        started.clear()
        for number in map_rows(partial(refusing, refused=None), ROWS[:num_rows], num_workers=2):
            done.append(number)
        assert started == expected


def slow(row):
    time.sleep(0.05)
    return row


SLOW_RUN = """
from shardwise.data import row_processes
from test_row_processes import ROWS, slow
row_processes.MEASURED_SECONDS, row_processes.WORTH_SECONDS = 0.0, -1.0
for _ in row_processes.map_rows(slow, ROWS * 1000, num_workers=3):
    pass
"""


@pytest.mark.parametrize("moment", ["working", pytest.param("starting", marks=pytest.mark.full)])
def test_they_end_with_a_process_that_is_killed(at_once, tmp_path, moment):
    def children():
        wanted = f"{MARK}={tmp_path}\0".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes()
                if b"shardwise.data.row_server" in command and wanted in (folder / "environ").read_bytes():
                    found.append(folder.name)
            except OSError:  # ended meanwhile
                continue
        return found

    def wait_for(condition):
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    run = subprocess.Popen([sys.executable, "-c", SLOW_RUN], env=os.environ | {MARK: str(tmp_path)})
    try:
        wait_for(lambda: len(children()) >= {"starting": 1, "working": 4}[moment])
    finally:
        run.kill()
        run.wait()
    wait_for(lambda: not children())


def assert_equal(found, expected):
    """Of dataclasses, lists and dicts with tensors."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif hasattr(expected, "__dataclass_fields__"):
        for field in fields(expected):
            assert_equal(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == expected


def user(number):
    content = f"<image>{number}+1=" if number % 3 == 0 else f"{number}+1="
    return {"role": "user", "content": content}


KINDS = {
    "sft": (supervised_samples, SupervisedDataConfig, {"max_sequence_tokens": 15}),
    "rl": (prompt_examples, PromptDataConfig, {"max_prompt_tokens": 11}),
    "pairs": (preference_pairs, PreferenceDataConfig, {"max_sequence_tokens": 17}),
    "kto": (labelled_samples, PreferenceDataConfig, {"max_sequence_tokens": 30}),
}


@pytest.mark.parametrize(
    "kind", ["pairs", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("sft", "rl", "kto"))]
)
def test_rows_of_every_kind_are_those_that_one_process_reads(at_once, seeing, tmp_path, kind, monkeypatch):
    """With images beside the file, whose path is relative, answers that are the same, rows that are cut, and rows that
    are dropped, whose numbers move those behind them up."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (16, 8), (20, 90, 200)).save(tmp_path / "0.png")
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in range(150):
            row = {"prompt": [user(number)], "images": ["0.png"] * (number % 3 == 0), "label": number % 2 == 0}
            row["messages"] = [user(number), {"role": "assistant", "content": str(number + 1) * (1 + number % 5)}]
            row |= {
                "response": "1" * (number % 30 + 1),
                "chosen": str(number) * (1 + number // 130),
                "rejected": str(number % 100),
            }
            file.write(json.dumps(row | {"reward_model": {"ground_truth": {"sum": [number]}}}) + "\n")
    read, config_class, limits = KINDS[kind]

    def rows(**settings):
        config = config_class(**limits, **settings)
        return read(config, ["rows.jsonl"], max_rows=None, **seeing)

    if kind == "kto":
        cut, expected = (rows(preprocessing_num_workers=count, on_overlong="truncate") for count in (2, 0))
        assert cut.counts == expected.counts
        assert cut.counts["num_truncated"] > 0
        assert_equal(cut.rows, expected.rows)
    found, expected = (rows(preprocessing_num_workers=count, on_overlong="drop") for count in (2, 0))
    assert found.counts == expected.counts
    assert 0 < found.counts["num_dropped"] < 150
    assert_equal(found.rows, expected.rows)
    assert any(row.image_refs for row in found.rows)
    assert found.digest() == expected.digest()
