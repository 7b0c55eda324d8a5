"""Processes that are forked after one import of the functions."""

import os
import resource
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from shardwise.config import ConfigError, FunctionReward
from shardwise.rewards import Answer, RewardJob
from shardwise.rewards.pool import RewardPool, check_functions

RULES = """
import os, subprocess, time

with open("imports", "a") as file:
    file.write("x")
HELPER = subprocess.Popen(["sleep", "1000"])
KEPT = {"calls": 0}


def f(solution_str, **_):
    KEPT["calls"] += 1
    match solution_str:
        case "exit with a child":
            child = subprocess.Popen(["sleep", "1000"])
            with open("child", "w") as file:
                file.write(str(child.pid))
            os._exit(3)
        case "hang":
            time.sleep(1000)
        case "parent":
            return os.getppid()
        case "helper":
            return HELPER.pid
    return KEPT["calls"]
"""


@pytest.fixture(autouse=True)
def _rules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.py").write_text(RULES)


@pytest.fixture
def pool():
    pool = RewardPool([FunctionReward(function="rules.py:f")], num_workers=2, timeout_seconds=1.0)
    yield pool
    pool.close()


def score(pool, texts):
    jobs = [RewardJob(uid=text, data_source="", solution_str=text, ground_truth="") for text in texts]
    return [answer for _, _, answer in sorted(pool.score(jobs), key=lambda reply: reply[0])]


def ends(pid):
    """Whether it is gone within seconds: the kernel takes a moment to end what has been killed."""
    deadline = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(pid)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_f48_processes_and_their_replacements_import_once(pool, tmp_path):
    failures = [answer.failure for answer in score(pool, ["hang", "hang", "exit with a child"])]
    assert failures == [*["did not return within 1 s"] * 2, "ended its process with exit code 3"]
    assert score(pool, [""])[0].score == 1.0  # what importing left is there, what calls left is not
    assert (tmp_path / "imports").read_text() == "x"


def test_children_of_a_process_that_ended_by_itself_are_ended(pool, tmp_path):
    score(pool, ["exit with a child"])
    assert ends(int((tmp_path / "child").read_text()))


def test_a_server_that_was_killed_is_replaced_and_costs_no_job(pool, tmp_path):
    helper, parent = score(pool, ["helper", "parent"])
    assert pool.pids[0] == parent.score
    os.kill(int(parent.score), signal.SIGKILL)
    time.sleep(0.1)
    first, second, third = score(pool, ["hang", "", "hang"])
    assert (first.failure, third.failure) == ("did not return within 1 s",) * 2
    assert second.failure is None
    assert score(pool, ["parent"])[0].score not in (parent.score, 1.0)
    assert (tmp_path / "imports").read_text() == "xx"
    assert ends(int(helper.score))


def test_a_process_is_ended_beside_more_open_files_than_select_can_watch(tmp_path):
    """Rank 0 of hundreds has them: a connection to each, several times over."""
    with ExitStack() as stack:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1024):
            stack.callback(os.close, os.dup(0))
        pool = RewardPool([FunctionReward(function="rules.py:f")], num_workers=1, timeout_seconds=0.1)
        stack.callback(pool.close)
        assert score(pool, ["hang"])[0].failure == "did not return within 0.1 s"


def test_close_ends_what_importing_started(pool):
    helper = int(score(pool, ["helper"])[0].score)
    pids = pool.pids
    assert all(is_alive(pid) for pid in (*pids, helper))
    pool.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert ends(helper)


def test_a_thread_that_importing_starts_is_an_error(tmp_path):
    (tmp_path / "threaded.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,), name='poller', daemon=True).start()\n"
        "def f(**_): return 1\n"
    )
    with pytest.raises(ConfigError) as caught:
        check_functions([FunctionReward(function="threaded.py:f")])
    assert str(caught.value) == (
        "reward.functions=threaded.py:f: importing started the thread poller, which does not exist in the processes "
        "that are forked after it; start it in the function's first call"
    )


def test_a_worker_multiplies_where_importing_has(tmp_path, monkeypatch):
    """Ranks have several threads each; a pool of them that is left by the import would hang its copies."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "2")
    (tmp_path / "matrix.py").write_text(
        "import torch\n"
        "ONES = torch.ones(1000, 1000)\n"
        "BEFORE = float((ONES @ ONES)[0, 0])\n"
        "def f(**_):\n"
        "    return {'score': float((ONES @ ONES)[-1, -1]), 'before': BEFORE, 'threads': torch.get_num_threads()}\n"
    )
    pool = RewardPool([FunctionReward(function="matrix.py:f")], num_workers=1, timeout_seconds=20.0)
    try:
        assert score(pool, ["", ""]) == [Answer(score=1000.0, parts={"before": 1000.0, "threads": 1.0})] * 2
    finally:
        pool.close()
