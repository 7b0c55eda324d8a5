import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from shardwise.config import ConfigError, JudgeLostError, RewardConfig, RewardError
from shardwise.rewards import RewardJob, Rewards, check_rewards
from shardwise.rewards.output import MAX_LINE_CHARACTERS, MAX_LINES

RULES = """
import ctypes, os, signal, subprocess, sys, time


def compute_score(data_source, solution_str, ground_truth, extra_info):
    action = solution_str.split(" ")
    match action[0]:
        case "number":
            return float(action[1])
        case "dict":
            return {"score": 0.5, "acc": True, "pred": "x"}
        case "echo":
            assert (data_source, ground_truth) == ("sums", "5"), (data_source, ground_truth)
            return extra_info["score"]
        case "raise":
            raise ValueError("cannot\\nparse")
        case "none":
            return None
        case "nan":
            return float("nan")
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "print":
            for _ in range(50):
                print("x" * 1_000_000)
                sys.stderr.write("y" * 1_000_000)
            return 1
        case "hang":
            child = subprocess.Popen(["sleep", "1000"])
            with open("pids", "a") as file:
                file.write(f"{os.getpid()} {child.pid} ")
            time.sleep(1000)
        case "spin":
            return 7 ** (10 ** 9)
        case "sleep":
            time.sleep(float(action[1]))
            return 1
        case "allocate":
            return len(bytearray(int(action[1])))
        case "stdin":
            return input()
        case "timed":
            began = time.monotonic()
            time.sleep(float(action[1]))
            return time.monotonic() - began
        case "pid":
            return os.getpid()
"""


@pytest.fixture(autouse=True)
def _rules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.py").write_text(RULES)


VALUE = {"on_failure": "value", "max_failure_rate": 1, "failure_value": -1.0}


def config(failures=VALUE, **settings):
    return RewardConfig(**{"functions": "rules.py:compute_score", **failures, **settings})


def job(action, number=0, **extra_info):
    return RewardJob(
        uid=f"train.jsonl:{number}", data_source="sums", solution_str=action, ground_truth="5", extra_info=extra_info
    )


def score(actions, **settings):
    with Rewards(config(**settings)) as pool:
        return pool.score([job(action, number) for number, action in enumerate(actions)])


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_come_in_the_order_of_the_jobs():
    actions = [action for n in range(20) for action in (f"number {n}", "sleep 0.01")]
    results = score(actions, num_workers=3)
    assert [result.score for result in results] == [value for n in range(20) for value in (float(n), 1.0)]
    assert all(result.failure is None and result.parts == {"compute_score": result.score} for result in results)


def test_a_pool_scores_again_and_again_and_nothing_for_no_jobs():
    with Rewards(config()) as pool:
        assert pool.score([]) == []
        assert [pool.score([job(f"number {n}")])[0].score for n in range(3)] == [0.0, 1.0, 2.0]


def test_arguments_arrive_as_given_and_numpy_as_plain_values():
    with Rewards(config(num_workers=1)) as pool:
        results = pool.score(
            [job("echo", score=0.25), job("echo", score=np.float32(0.5)), job("echo", score=np.ones(2))]
        )
    assert [result.score for result in results] == [0.25, 0.5, -1.0]
    assert results[2].failure.startswith("returned the list [1.0, 1.0], expected a finite number")


def test_trap_22_every_failure_is_named_and_costs_only_its_own_job():
    expected = {
        "number 1": None,
        "raise": "ValueError: cannot parse (rules.py line 16)",
        "exit": "ended its process with exit code 3",
        "none": 'returned None, expected a finite number or a dict with a finite "score"',
        "kill": "ended its process by SIGKILL (out of memory?)",
        "nan": 'returned nan, expected a finite number or a dict with a finite "score"',
        "segfault": "ended its process by SIGSEGV",
        "stdin": "EOFError: EOF when reading a line (rules.py line 45)",
    }
    actions = [*expected] * 2
    results = score(actions)
    failures = [result.failure for result in results]
    assert failures == [expected[action] for action in actions]
    assert [result.score for result in results] == [1.0 if expected[action] is None else -1.0 for action in actions]


def test_f13_a_call_that_wants_too_much_memory_fails_alone():
    """16 GiB with a limit of 1: the call hears of it, and the process goes on."""
    actions = ["number 1", f"allocate {1 << 34}", "number 2", f"allocate {1 << 20}"]
    results = score(actions, num_workers=1, memory_bytes=1 << 30)
    assert [result.failure for result in results] == [None, "MemoryError (rules.py line 43)", None, None]
    assert [result.score for result in results] == [1.0, -1.0, 2.0, 1 << 20]


def test_f13_a_process_that_ends_under_a_limit_of_memory_is_told_with_it():
    (result,) = score(["exit"], num_workers=1, memory_bytes=1 << 30)
    assert result.failure == "ended its process with exit code 3 under reward.memory_bytes=1073741824"


def test_a_dict_gives_score_and_parts():
    (result,) = score(["dict"])
    assert (result.score, result.parts, result.failure) == (0.5, {"acc": 1.0, "compute_score": 0.5}, None)


def test_f42_a_hang_is_ended_with_its_children_and_the_jobs_behind_it_are_scored(tmp_path):
    begin = time.monotonic()
    actions = ["number 1", "number 2", "hang", *(f"number {n}" for n in range(3, 40)), "spin"]
    results = score(actions, timeout_seconds=1.5)
    assert time.monotonic() - begin < 30
    failures = {number: result.failure for number, result in enumerate(results) if result.failure}
    assert failures == {2: "did not return within 1.5 s", 40: "did not return within 1.5 s"}
    assert [result.score for result in results[3:40]] == [float(n) for n in range(3, 40)]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)


def test_trap_22_printing_100_megabytes_neither_blocks_nor_breaks(capfd):
    assert [result.score for result in score(["print", "number 2", "print"], num_workers=1)] == [1.0, 2.0, 1.0]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == MAX_LINES + 1
    assert len(err) < 2 * MAX_LINES * MAX_LINE_CHARACTERS


def test_a_process_that_died_while_idle_is_replaced_and_blamed_on_no_job():
    with Rewards(config({"on_failure": "abort"}, num_workers=1)) as pool:
        (first,) = pool.score([job("pid")])
        os.kill(int(first.score), signal.SIGKILL)
        time.sleep(0.2)
        (second,) = pool.score([job("pid")])
    assert second.score != first.score


def test_close_leaves_no_process_and_an_error_closes():
    with Rewards(config(num_workers=3)) as pool:
        pool.score([job("number 1")])
        pids = pool._pool.pids
        assert all(is_alive(pid) for pid in pids)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)

    pool = Rewards(config({"on_failure": "abort"}))
    pids = pool._pool.pids
    with pytest.raises(RewardError):
        pool.score([job("sleep 100"), job("raise")])
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_pipes_are_closed_when_processes_are_replaced():
    with Rewards(config(num_workers=1)) as pool:
        pool.score([job("number 1")])
        before = len(os.listdir("/proc/self/fd"))
        pool.score([job("exit")] * 3)
        assert len(os.listdir("/proc/self/fd")) == before


def test_f41_abort_names_function_row_and_reason():
    with Rewards(config({"on_failure": "abort"})) as pool, pytest.raises(RewardError) as caught:
        pool.score([job("number 1", 6), job("raise", 7)])
    assert str(caught.value) == (
        "reward function rules.py:compute_score failed for row train.jsonl:7: ValueError: cannot parse "
        "(rules.py line 16). Fix the function, or set reward.on_failure=value to score such rows "
        "reward.failure_value=0, or =mask to leave them out"
    )


def test_a_row_without_a_json_form_is_an_error_that_names_it():
    with Rewards(config(num_workers=1)) as pool, pytest.raises(RewardError) as caught:
        pool.score([job("number 1", 3, image=b"png")])
    assert str(caught.value).startswith(
        "row train.jsonl:3 cannot be sent to a reward function: a bytes has no JSON form"
    )


@pytest.mark.alone
def test_f48_short_jobs_keep_the_pool_busy():
    """Against what the calls themselves took, so that a busy machine slows both sides."""
    num_jobs = 2000
    with Rewards(config(num_workers=2)) as pool:
        pool.score([job("number 1")] * 2)
        begin = time.monotonic()
        results = pool.score([job("timed 0.001")] * num_jobs)
        seconds = time.monotonic() - begin
    assert all(result.failure is None for result in results)
    # One process alone, or two that wait for each way back and forth on a busy machine, stay below.
    assert sum(result.score for result in results) / 2 / seconds > 0.4


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("compute_score", "is not of the form path/to/file.py:name"),
        ("missing.py:f", "reward.functions=missing.py:f: there is no file missing.py in"),
        ("rules.py:compute_scor", "did you mean compute_score?"),
        (
            "noisy.py:f",
            "reward.functions=noisy.py:f: importing noisy.py failed: KeyError: 'HOME_OF_RULES' (noisy.py line 4)",
        ),
        ("crashes.py:f", "reward.functions=crashes.py:f: importing the function ended its process by SIGABRT"),
        ("quits.py:f", "reward.functions=quits.py:f: importing the function ended its process with exit code 0"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_a_config_error(tmp_path, spec, message):
    (tmp_path / "noisy.py").write_text(
        "import os\nfor _ in range(20):\n    print('x' * 1_000_000)\nos.environ['HOME_OF_RULES']\n"
    )
    (tmp_path / "crashes.py").write_text("import os\nos.abort()\n")
    (tmp_path / "quits.py").write_text("import os\nos._exit(0)\n")
    with pytest.raises(ConfigError) as checked:
        check_rewards(config(functions=spec))
    assert message in str(checked.value)
    with Rewards(config(functions=spec, num_workers=1)) as pool, pytest.raises(ConfigError) as scored:
        pool.score([job("number 1")])
    assert str(scored.value) == str(checked.value)


def test_functions_whose_process_is_killed_while_it_imports_may_do_better_another_time(tmp_path):
    """They were loaded before any rank started: it is the machine that lacks memory."""
    (tmp_path / "killed.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    told = "reward.functions=killed.py:f: importing the function ended its process by SIGKILL"
    with pytest.raises(ConfigError, match=told):
        check_rewards(config(functions="killed.py:f"))
    with Rewards(config(functions="killed.py:f", num_workers=1)) as pool, pytest.raises(JudgeLostError, match=told):
        pool.score([job("number 1")])


def test_check_accepts_a_good_one():
    check_rewards(config())
    check_rewards(config(functions="shardwise.rewards.math:gsm8k_score"))
