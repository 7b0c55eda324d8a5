import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANK = f"""
import os, sys, time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import torch
import torch.distributed as dist
from shardwise.controller import peers
from shardwise.controller.neighbours import watching_neighbour
from shardwise.controller.peers import watched_by_peers
from shardwise.controller.process_group import Rank, connect
from shardwise.controller.roll_call import RollCall
peers._LEAVE_SECONDS = 1.0
folder, number, ends = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "ends"
if ends:
    RollCall.report_loss = lambda roll: print("a loss is reported")
rank, store = Rank(number, 3, number), dist.FileStore(str(folder / "store"), 3)
with ExitStack() as stack:
    stack.enter_context(watched_by_peers(rank, store, None, timeout_seconds=600))
    links = connect("background", rank, store, timeout=timedelta(minutes=10))
    stack.enter_context(watching_neighbour(rank, links, store, timeout_seconds=float(sys.argv[4])))
    for tag in (0, 1):  # commands, and shards for a checkpoint
        sent, came = torch.full((9,), number), torch.zeros(9, dtype=torch.int64)
        works = [links.send([sent], (number - 1) % 3, tag), links.recv([came], (number + 1) % 3, tag)]
        for work in works:
            work.wait()
        assert came.eq((number + 1) % 3).all()
    (folder / f"there-{{number}}").touch()
    while not (ends and (folder / "end").exists()):  # at work that needs no other rank, as a judge's
        time.sleep(0.05)
    if number == 1:
        time.sleep(3.0)
print("done")
"""


@pytest.fixture
def ranks(tmp_path):
    """Of three, each a process; they do what they are told until they are killed, or asked to end."""
    started = []

    def start(how, timeout_seconds=60):
        started.extend(
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(tmp_path), str(number), how, str(timeout_seconds)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(3)
        )
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("there-*"))) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("victim", [pytest.param(1, marks=pytest.mark.full), 2])
def test_f01_rank_0_ends_within_seconds_of_a_rank_that_was_killed_while_it_waits_for_something_else(ranks, victim):
    """Of rank 2 it hears from rank 1."""
    processes = ranks("is killed")
    processes[victim].kill()
    began = time.monotonic()
    _, told = processes[0].communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert processes[0].returncode == 1
    assert f"error: rank {victim} on {socket.gethostname()} is gone and left no word" in told


def test_ranks_that_are_done_say_farewell_and_wait_for_one_that_is_late(ranks, tmp_path):
    processes = ranks("ends")
    (tmp_path / "end").touch()
    for process in processes:
        said, told = process.communicate(timeout=60)
        assert (process.returncode, said, "error" in told) == (0, "done\n", False), told


def test_f03_a_rank_that_is_never_done_is_named_after_the_timeout(ranks, tmp_path):
    """Rank 1 takes three seconds longer than rank 0 waits for it."""
    processes = ranks("ends", timeout_seconds=1)
    (tmp_path / "end").touch()
    _, told = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 1
    assert (
        "error: rank 0 is done, and rank 1 has not been for 1 s (engine.collective_timeout_seconds): it hangs" in told
    )
