import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from shardwise.controller.signals import SecondSignal, pass_on, stop_signals


def test_signals_are_heard_while_the_main_thread_looks_at_none():
    """It is in a library, as in a collective, when SIGTERM comes."""
    heard = []
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with stop_signals(lambda number: heard.append((number, time.monotonic()))):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)
        returned = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 5
        while len(heard) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [number for number, _ in heard] == [signal.SIGTERM, signal.SIGINT]
    assert heard[0][1] < returned
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(("handling", "is_heard"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_terminal_that_closes_is_heard_except_under_nohup(handling, is_heard):
    before = signal.signal(signal.SIGHUP, handling)
    heard = []
    try:
        with stop_signals(heard.append):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 5
            while signal.SIGTERM not in heard and time.monotonic() < deadline:
                time.sleep(0.01)
        assert signal.getsignal(signal.SIGHUP) is handling
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (signal.SIGHUP in heard, signal.SIGTERM in heard) == (is_heard, True)


@pytest.mark.parametrize(
    ("at", "are_second"),
    [([100.0, 100.1, 101.5, 104.9, 105.0, 110.0], [False, False, False, False, True, True]), ([100.0, 900.0], [0, 1])],
)
def test_signals_within_five_seconds_of_the_first_are_its_copies(monkeypatch, at, are_second):
    monkeypatch.setattr("shardwise.controller.signals.time", SimpleNamespace(monotonic=iter(at).__next__))
    second = SecondSignal()
    assert [second.has_come() for _ in at] == are_second


def test_other_ranks_pass_signals_on_to_rank_0_where_a_launcher_started_them(monkeypatch):
    rank_0 = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.delenv("SHARDWISE_RANK_0", raising=False)
    pass_on(signal.SIGTERM)
    assert rank_0.poll() is None
    monkeypatch.setenv("SHARDWISE_RANK_0", str(rank_0.pid))
    pass_on(signal.SIGTERM)
    assert rank_0.wait(timeout=10) == -signal.SIGTERM
    pass_on(signal.SIGTERM)  # it has ended already
