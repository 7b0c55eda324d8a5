"""What reward functions print reaches standard error."""

import os
import time

import pytest

from shardwise.config import ConfigError, FunctionReward
from shardwise.rewards import RewardJob
from shardwise.rewards.output import MAX_LINE_CHARACTERS, MAX_LINES, PERIOD_SECONDS, Output, RateLimitedLog
from shardwise.rewards.pool import RewardPool, check_functions
from shardwise.rewards.process import ForkServer

RULES = """
import os, subprocess, sys, time

print("imported")


def f(solution_str, **_):
    match solution_str:
        case "say":
            print("to stdout", 5)
            print("to stderr", file=sys.stderr)
            subprocess.run(["echo", "a child"])
        case "partial":
            print("first", end=", ")
            print("second", end="")
        case "bytes":
            os.write(1, b"caf\\xe9 \\x00\\n")
        case "bar":
            print("10 %\\r 100 %")
        case "no newline":
            sys.stdout.write("x" * 10_000_000)
        case "many":
            for number in range(100_000):
                print(number)
        case "exit":
            print("one\\ntwo")
            print("goodbye", end="")
            os._exit(3)
        case "hang":
            print("waiting")
            time.sleep(1000)
        case "program":
            from shardwise.rewards.sandbox import Limits, run_python
            code = "import sys; print('inside'); print('inside', file=sys.stderr)"
            return len(run_python(code, limits=Limits(), allow_unsafe=True).stdout)
    return 1


def g(**_):
    print("from g")
    return 1
"""
NAME = "reward function rules.py:f: "


@pytest.fixture(autouse=True)
def _rules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # nothing is to rely on it
    (tmp_path / "rules.py").write_text(RULES)


def score(*texts, names=("f",), timeout_seconds=20.0):
    functions = [FunctionReward(function=f"rules.py:{name}") for name in names]
    pool = RewardPool(functions, num_workers=1, timeout_seconds=timeout_seconds)
    jobs = [RewardJob(uid=text, data_source="", solution_str=text, ground_truth="") for text in texts]
    try:
        return [answer for _, _, answer in sorted(pool.score(jobs), key=lambda reply: reply[:2])]
    finally:
        pool.close()


def said(capfd):
    out, err = capfd.readouterr()
    assert out == ""
    return err.splitlines()


def test_what_importing_a_function_and_its_children_print_is_said_line_by_line(capfd):
    score("say", "partial")
    lines = ["imported", "to stdout 5", "to stderr", "a child", "first, second"]
    assert said(capfd) == [NAME + line for line in lines]


def test_several_functions_share_a_name(capfd):
    score("", names=("f", "g"))
    assert said(capfd) == ["reward functions: imported", "reward functions: from g"]


def test_bytes_that_are_no_text_and_the_steps_of_a_bar(capfd):
    score("bytes", "bar")
    assert said(capfd)[1:] == [f"{NAME}caf\ufffd \0", f"{NAME} 100 %"]


def test_a_flood_is_cut_and_holds_nobody_up(capfd):
    assert [answer.score for answer in score("no newline", "many")] == [1.0, 1.0]
    *lines, last = said(capfd)
    pieces = -(-10_000_000 // (1 << 16))
    assert pieces > MAX_LINES  # of one long line: they are bounded too
    assert lines == [f"{NAME}imported", *[f"{NAME}{'x' * MAX_LINE_CHARACTERS}..."] * (MAX_LINES - 1)]
    assert last.startswith(f"{NAME}more than {MAX_LINES} lines; what it prints in the next ")
    assert last.endswith(" s is left out")


def test_after_a_while_lines_are_said_again(monkeypatch, capsys):
    now = 1000.0
    monkeypatch.setattr("shardwise.rewards.output.time.monotonic", lambda: now)
    log = RateLimitedLog("f")
    for number in range(MAX_LINES + 5):
        log.tell(str(number))
    now += PERIOD_SECONDS - 1
    log.tell("too early")
    now += 1
    log.tell("again")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:MAX_LINES] == [f"f: {number}" for number in range(MAX_LINES)]
    assert lines[MAX_LINES:] == ["f: more than 100 lines; what it prints in the next 60 s is left out", "f: again"]


def test_the_failure_of_a_call_that_died_or_hung_has_the_last_words(capfd):
    failures = [answer.failure for answer in score("exit", "hang", "exit", timeout_seconds=1.0)]
    died = "ended its process with exit code 3; it last printed: one | two | goodbye"
    assert failures == [died, "did not return within 1 s; it last printed: waiting", died]
    words = ["one", "two", "goodbye"]
    assert said(capfd)[1:] == [NAME + line for line in [*words, "waiting", *words]]


def test_an_import_that_dies_has_the_last_words_in_its_error(tmp_path, capfd):
    (tmp_path / "dies.py").write_text("import os\nprint('no table')\nos._exit(4)\n")
    with pytest.raises(ConfigError) as caught:
        check_functions([FunctionReward(function="dies.py:f")])
    assert str(caught.value) == (
        "reward.functions=dies.py:f: importing the function ended its process with exit code 4; it last printed: "
        "no table; it must import in a fresh Python process"
    )
    assert said(capfd) == ["reward function dies.py:f: no table"]


def test_what_a_program_in_the_sandbox_prints_is_its_own(capfd):
    assert [answer.score for answer in score("program")] == [len("inside\n")]
    assert said(capfd) == [f"{NAME}imported"]


def test_a_pipe_that_a_process_left_behind_keeps_is_waited_for_a_moment_and_then_closed(monkeypatch, capsys):
    monkeypatch.setattr("shardwise.rewards.output._DRAIN_SECONDS", 0.5)
    read_fd, write_fd = os.pipe()
    output = Output(read_fd, RateLimitedLog("f"))
    os.write(write_fd, b"a\nb")
    began = time.monotonic()
    assert [output.last_words() for _ in range(4)] == 4 * ["; it last printed: a"]
    assert time.monotonic() - began < 1.5, "all of them wait for one moment"
    while output.last_words() != "; it last printed: a | b":  # the rest of a line, when nobody reads on
        assert time.monotonic() < began + 20
        time.sleep(0.01)
    output._thread.join(20)
    assert capsys.readouterr().err == "f: a\nf: b\n"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read_fd)
    os.close(write_fd)


class FullDisk:
    def tell(self, line):
        raise OSError(28, "No space left on device")


def test_prints_that_cannot_be_said_are_read_all_the_same():
    """Else the next print of the function would fail, and with it every score."""
    read_fd, write_fd = os.pipe()
    output = Output(read_fd, FullDisk())
    os.write(write_fd, b"a\n" + 30_000 * b"x\n")
    os.write(write_fd, 30_000 * b"y\n" + b"z\n")
    os.close(write_fd)
    output._thread.join(20)
    assert output.last_words().endswith("y | y | z")


def test_a_process_that_is_given_up_while_it_imports_says_nothing(tmp_path, capfd):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.3)\ndef f(**_): return 1.0\n")
    server = ForkServer([FunctionReward(function=f"{tmp_path}/slow.py:f")])
    server._control.close()
    server._process.wait(timeout=20)
    server._output.finish()
    os.close(server._lifeline_fd)
    assert capfd.readouterr().err == ""
