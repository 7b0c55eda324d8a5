import itertools
import re
import signal
import sys

import pytest
import torch

from shardwise.controller import memory
from shardwise.controller.failures import Note
from shardwise.controller.launch import launch
from shardwise.controller.memory import MemoryHistory

GROWS = """
import os, signal, sys, time
held = []
while os.environ["RANK"] == "1" and len(held) < 4:
    held.append(bytearray(b"x") * (128 << 20))
    time.sleep(0.4)
if held:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def test_the_newest_the_middle_and_the_oldest_sample_of_the_last_minute_are_told(monkeypatch):
    clock, sizes = itertools.count(100), itertools.count(2)
    monkeypatch.setattr(memory.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(memory, "_resident_bytes", lambda pid: 0 if pid == 8 else next(sizes) << 29)
    history = MemoryHistory()
    assert history.told(1) == ""
    history.sample({1: 7, 0: 8})
    assert history.told(1) == "it held 1.0 GiB"
    for _ in range(99):
        history.sample({1: 7, 0: 8})
    assert history.told(1) == "it held 50.5 GiB, 29 s before 36.0 GiB, 59 s before 21.0 GiB"
    assert history.told(0) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_f13_a_rank_that_the_kernel_ended_for_want_of_memory_is_told_with_what_it_held(monkeypatch, capfd):
    counts = itertools.count()
    monkeypatch.setattr("shardwise.controller.launch.num_killed_for_memory", lambda: next(counts))
    monkeypatch.setattr(memory, "_SECONDS_BETWEEN", 0.1)
    assert launch([sys.executable, "-c", GROWS], nproc=2) == 1
    told = capfd.readouterr().err
    assert told.startswith(
        f"error: rank 1 was ended by {signal.SIGKILL.name} (out of memory: the kernel ended it; it held 0.5 "
    )
    *_, first = told.partition(";")[2].split(" before ")
    assert first.startswith(("0.0 GiB", "0.1 GiB"))


LIMITED = """
import os, resource, sys, time
from shardwise.controller.failures import note_failure
rank = int(os.environ["RANK"])
if rank == 1:
    import torch
    held = torch.ones(96 << 20)
    time.sleep(0.8)
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), resource.RLIM_INFINITY))
    try:
        torch.ones(1 << 30) if sys.argv[1] == "torch" else bytearray(1 << 30)
    except Exception as error:
        sys.exit(note_failure(error, rank))
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("by", "message"),
    [pytest.param("python", "MemoryError", marks=pytest.mark.full), ("torch", ".*can't allocate memory.*")],
)
def test_f13_a_rank_that_asks_for_more_than_its_limit_is_told_with_what_it_held(monkeypatch, capfd, by, message):
    monkeypatch.setattr(memory, "_SECONDS_BETWEEN", 0.1)
    assert launch([sys.executable, "-c", LIMITED, by], nproc=2) == 1
    told = capfd.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        rf"error: rank 1 failed: out of memory: {message}; smaller micro-batches, activation checkpointing and offload "
        r"need less; it held 0\.[4-9] GiB, .* before .*",
        told,
    ), told


def test_a_device_without_memory_is_told_as_such():
    note = Note.of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 0)
    assert note.message.startswith("out of memory: CUDA out of memory. Tried to allocate 2 GiB; smaller micro-batches")
    assert not note.lacks_host_memory
