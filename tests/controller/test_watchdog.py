"""Processes that are killed, stopped or hang in a library, seen from outside."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardwise.controller import watchdog
from shardwise.controller.watchdog import Activity, collect, write_reports

ROOT = Path(__file__).parents[2]
RANK = f"""
import hashlib, os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from shardwise.controller.watchdog import be_watched, commanded, enter_phase, enter_step
rank = int(sys.argv[1])

def deep_in_a_library():
    "Holds the interpreter's lock, so that no thread of this process runs Python."
    pow(3, 10**9)

be_watched(rank)
enter_step(7)
enter_phase("train")
with commanded("train", [{{"a": 1}}, "policy", "", "x" * 50]):
    if rank == 0:
        deep_in_a_library()
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def ranks(tmp_path):
    """0 is deep in a library, 1 is stopped, 2 has not begun."""
    environment = {**os.environ, "SHARDWISE_JOB_FOLDER": str(tmp_path)}
    processes = [subprocess.Popen([sys.executable, "-c", RANK, str(rank)], env=environment) for rank in (0, 1)]
    processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
    deadline = time.monotonic() + 30
    while any((Activity.read(tmp_path, rank) or Activity()).command == "" for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while Path(f"/proc/{processes[1].pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.02)
    yield {rank: process.pid for rank, process in enumerate(processes)}
    for process in processes:
        process.kill()
        process.wait()


def test_f3_what_every_rank_does_is_told_and_who_did_not_answer(ranks, tmp_path):
    reports, silent = collect(tmp_path, range(4), ranks, {3: "it failed before\n"})
    assert silent == {1: "is stopped (SIGSTOP)", 2: "has not started yet"}
    assert reports[0].startswith("rank 0: step 7, train, `train policy`, for ")
    assert "in deep_in_a_library" in reports[0]
    assert f"process {ranks[1]} is stopped (SIGSTOP)" in reports[1]
    assert "step 7, train, `train policy`" in reports[1]
    assert reports[2] == f"rank 2: not started yet\nprocess {ranks[2]} has not started yet\n"
    assert reports[3] == "rank 3: not started yet\nended\n\nit failed before\n"
    os.kill(ranks[2], 0)  # the signal would have ended it


def test_reports_of_an_earlier_hang_stay(tmp_path):
    for number in ("1", "2"):
        assert write_reports(tmp_path / "faults", {0: f"a{number}", 1: "b"}) == tmp_path / "faults" / number
    assert (tmp_path / "faults" / "1" / "rank_0.txt").read_text() == "a1"
    assert (tmp_path / "faults" / "2" / "rank_0.txt").read_text() == "a2"


@pytest.fixture
def watched(monkeypatch, tmp_path):
    """This process, as a rank."""
    monkeypatch.setattr(watchdog, "_record", watchdog._Record(tmp_path / "activity-0"))
    return lambda: Activity.read(tmp_path, 0)


def test_activity_follows_steps_phases_and_commands(watched):
    assert watched().place == ""
    watchdog.enter_step(3)
    watchdog.enter_phase("save")
    with watchdog.commanded("save_state", ["policy", "/a/folder"]):
        assert (
            watched().place == "step 3, save, `save_state policy`"
        )  # a path of what may never be written tells nothing
        assert 0 <= watched().seconds < 5
    assert watched().place == "step 3, save"
    with pytest.raises(ZeroDivisionError), watchdog.commanded("train", []):
        raise ZeroDivisionError
    assert watched().place == "step 3, save, `train`"  # where it failed
    watchdog.enter_step(4)
    assert (watched().step, watched().phase) == (4, "")


def test_a_command_in_the_background_is_told_beside_the_other(watched):
    with watchdog.commanded("train", ["policy"]):
        writing, release = threading.Event(), threading.Event()

        def write():
            with watchdog.commanded("write", []):
                writing.set()
                release.wait(5)

        thread = threading.Thread(target=write)
        thread.start()
        assert writing.wait(5)
        assert watched().place == "`train policy` and `write`"
        release.set()
        thread.join()
        assert watched().place == "`train policy`"


@pytest.mark.alone
def test_keeping_it_costs_little_of_a_short_command(watched):
    """At most 0.2 ms, two short writes to a file. In time of the processor, and the best of ten, because others may use
    this machine too."""

    def seconds(count: int) -> float:
        start = time.thread_time()
        for _ in range(count):
            with watchdog.commanded("train", [[1, 2], {"a": 1}, "policy", ""]):
                pass
        return (time.thread_time() - start) / count

    assert min(seconds(100) for _ in range(10)) < 0.02 * 0.010


@pytest.mark.alone
def test_a_rank_that_gives_up_waits_until_the_others_were_asked_and_no_longer(monkeypatch, tmp_path):
    monkeypatch.setattr(watchdog, "_DUMP_SECONDS", 0.1)
    start = time.monotonic()
    watchdog.wait_until_collected(tmp_path)
    assert 0.2 <= time.monotonic() - start < 5
    collect(tmp_path, range(1), {}, {})
    start = time.monotonic()
    watchdog.wait_until_collected(tmp_path)
    assert time.monotonic() - start < 0.15
