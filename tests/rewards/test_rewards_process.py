import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.config import FunctionReward
from shardwise.rewards.process import ForkServer, RewardProcess, WorkerLost, wait_for_any

ARGUMENTS = '{"data_source": "", "solution_str": "", "ground_truth": "", "extra_info": {}}'
ROOT = Path(__file__).resolve().parents[2]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def answers(process, count):
    received = []
    deadline = time.monotonic() + 60
    while len(received) < count:
        assert time.monotonic() < deadline, "waited too long"
        wait_for_any([process])
        received += process.receive()
    return received


def wait_until_ready(server):
    while not server.ready:
        wait_for_any([server])
        server.receive()


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = []

    def start(source, *, timeout_seconds=30.0):
        (tmp_path / "rules.py").write_text(source)
        server = ForkServer([FunctionReward(function="rules.py:f")])
        wait_until_ready(server)
        started.append((RewardProcess(server, timeout_seconds=timeout_seconds), server))
        return started[-1][0]

    yield start
    for process, server in started:
        process.kill()
        server.close()


def test_jobs_larger_than_a_pipe_go_through_without_blocking(start):
    process = start("def f(solution_str, **_): return len(solution_str)\n")
    text = "x" * 3_000_000
    process.send(0, ARGUMENTS.replace('"solution_str": ""', f'"solution_str": "{text}"'))
    process.send(1, ARGUMENTS)
    assert [(answer["job"], answer["score"]) for answer in answers(process, 2)] == [(0, 3_000_000.0), (1, 0.0)]
    assert process.ready
    assert not process.jobs


def test_a_fork_that_returns_from_the_function_is_caught_not_mistaken_for_an_answer(start):
    process = start("import os\ndef f(**_):\n    os.fork()\n    return 1\n")
    process.send(7, ARGUMENTS)
    with pytest.raises(WorkerLost, match="wrote to a pipe that belongs to Shardwise"):
        answers(process, 2)


def test_a_dead_process_is_noticed_while_a_grandchild_holds_its_pipe_open(start):
    source = "import os, time\ndef f(**_):\n    if os.fork() == 0: time.sleep(300)\n    os._exit(5)\n"
    process = start(source)
    process.send(0, ARGUMENTS)
    begin = time.monotonic()
    with pytest.raises(WorkerLost, match="exit code 5"):
        answers(process, 1)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(("number", "name"), [(9, r"SIGKILL \(out of memory\?\)"), (39, "signal 39")])
def test_a_process_that_a_signal_ended_says_which(start, number, name):
    """A real-time signal has no name of its own."""
    process = start(f"import os\ndef f(**_): os.kill(os.getpid(), {number})\n")
    process.send(0, ARGUMENTS)
    with pytest.raises(WorkerLost, match=f"^ended its process by {name}$"):
        answers(process, 1)


@pytest.mark.parametrize("hang", ["time.sleep(1000)", "7 ** (10 ** 9)"], ids=["sleeping", "in C with the lock held"])
def test_the_death_of_the_parent_ends_process_and_grandchild_in_the_middle_of_a_call(tmp_path, hang):
    (tmp_path / "rules.py").write_text(
        "import os, subprocess, time\n"
        "def f(**_):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        "    open('pids.tmp', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "    os.rename('pids.tmp', 'pids')\n"
        f"    {hang}\n"
    )
    parent_code = (
        f"import sys, os; sys.path.insert(0, {str(ROOT)!r}); os.chdir({str(tmp_path)!r})\n"
        "from shardwise.config import RewardConfig\n"
        "from shardwise.rewards import RewardJob, Rewards\n"
        "pool = Rewards(RewardConfig(functions='rules.py:f', num_workers=1))\n"
        "pool.score([RewardJob(uid='a', data_source='', solution_str='', ground_truth='')])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code])
    try:
        wait_until((tmp_path / "pids").exists)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(is_alive(pid) for pid in pids)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(timeout=10)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), seconds=5)


def test_f42_jobs_behind_a_long_call_are_taken_back_and_not_done(start, tmp_path):
    source = (
        "import time\n"
        "def f(solution_str, **_):\n"
        "    open('calls', 'a').write(solution_str + ' ')\n"
        "    time.sleep(float(solution_str))\n"
        "    return float(solution_str)\n"
    )
    process = start(source)

    def send(job, text):
        process.send(job, ARGUMENTS.replace('"solution_str": ""', f'"solution_str": "{text}"'))

    send(0, "0")
    assert [answer["job"] for answer in answers(process, 1)] == [0]
    assert process.wants_more
    send(1, "1.5")
    send(2, "0.25")
    send(3, "0.125")
    assert process.take_back() == []  # the call may still be a short one
    wait_until(lambda: process.take_back() == [2, 3])
    assert not process.wants_more  # nothing is put behind a long call
    send(2, "0.5")  # the same job again, to the same process
    assert [(answer["job"], answer["score"]) for answer in answers(process, 2)] == [(1, 1.5), (2, 0.5)]
    assert (tmp_path / "calls").read_text() == "0 1.5 0.5 "
