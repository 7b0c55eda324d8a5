import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.config import ConfigError
from shardwise.controller import peers
from shardwise.controller.base import RankStalledError
from shardwise.controller.failures import Note
from shardwise.controller.peers import Peers, watched_by_peers
from shardwise.controller.process_group import Rank
from shardwise.controller.roll_call import RollCall
from shardwise.controller.watchdog import Activity, commanded, enter_step

ROOT = Path(__file__).parents[2]
WAITING = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from shardwise.controller.watchdog import be_watched, commanded
be_watched(1, Path(sys.argv[1]))
with commanded("train", ["policy"]):
    time.sleep(60)
"""


@pytest.fixture
def hanging(tmp_path):
    """Rank 1 of the host whose ranks are watched in tmp_path."""
    process = subprocess.Popen([sys.executable, "-c", WAITING, str(tmp_path)])
    while (Activity.read(tmp_path, 1) or Activity()).command == "":
        assert process.poll() is None
    yield process
    process.kill()
    process.wait()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.delenv("SHARDWISE_JOB_FOLDER", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(peers, "SETTLE_SECONDS", 0.0)


def watched(rank, store, *, timeout_seconds=600):
    return watched_by_peers(rank, store, None, timeout_seconds=timeout_seconds)


def test_the_first_that_gives_up_tells_who_hangs_and_ends_it(hanging, tmp_path, capsys):
    reports = tmp_path / "run" / "faults"
    assert (
        Peers(tmp_path, Rank(0, 4, 0), reports, dist.HashStore()).note_failure(RuntimeError("Timed out waiting 9 ms"))
        == 1
    )
    assert re.fullmatch(
        r"error: rank 1 hangs in `train policy`: rank 0 waited in vain \(Timed out waiting 9 ms\); stacks of the ranks "
        rf"on .+: {reports}/1\n",
        capsys.readouterr().err,
    )
    assert "<module>" in (reports / "1" / "rank_1.txt").read_text()
    assert hanging.wait(timeout=5) == -9


def test_the_second_one_leaves_it_to_the_first(hanging, tmp_path, capsys, monkeypatch):
    """It gives it the time that the ranks of other hosts may take to answer."""
    waits: list[float] = []
    monkeypatch.setattr(peers.time, "sleep", waits.append)
    first, second = (
        Peers(tmp_path, Rank(0, 4, 0), None, dist.HashStore()),
        Peers(tmp_path, Rank(2, 4, 2), None, dist.HashStore()),
    )
    assert first.note_failure(RuntimeError("Timed out waiting 9 ms")) == 1
    told = capsys.readouterr().err
    assert told == "error: rank 1 hangs in `train policy`: rank 0 waited in vain (Timed out waiting 9 ms)\n"
    assert second.note_failure(RuntimeError("Timed out waiting 9 ms")) == 1
    assert (waits[-1], capsys.readouterr().err) == (5.0, "")


@pytest.fixture
def waited_in_vain(tmp_path, monkeypatch):
    """Two ranks of four have: those that are given, whose host is watched in tmp_path. Returns the store of all."""
    monkeypatch.setattr(peers, "_ANSWER_SECONDS", 0.0)
    ended = subprocess.Popen(["true"])  # as if they had left: this process is not to be asked for its stacks
    ended.wait()

    def leave(ranks):
        store = dist.HashStore()
        for rank in range(4):
            RollCall(store, rank, 4).enter()
        for rank in ranks:
            note = Note.of(RuntimeError("Timed out waiting 9 ms"), rank)
            note.leave(tmp_path)
            RollCall(store, rank, 4).leave(note)
            activity = Activity(step=3, phase="train", pid=ended.pid)
            (tmp_path / f"activity-{rank}").write_text(json.dumps(asdict(activity)))
        return store

    return leave


@pytest.mark.parametrize("asks", [0, 1])
def test_ranks_of_another_host_that_are_silent_are_named_where_none_of_this_one_hangs(
    waited_in_vain, tmp_path, capsys, asks
):
    """As of one that lost its network within a collective."""
    store, reports, host = waited_in_vain([0, 1]), tmp_path / "faults", socket.gethostname()
    error = RuntimeError("Timed out waiting 9 ms")
    assert Peers(tmp_path, Rank(asks, 4, asks), reports, store).note_failure(error) == 1
    assert re.fullmatch(
        rf"error: rank 2 on {host}, rank 3 on {host} are gone and left no word: .+ last checkpoint; rank {asks} waited "
        rf"in step 3, train; stacks of the ranks on {host}: {reports}/1\n",
        capsys.readouterr().err,
    )


def test_what_a_rank_of_this_host_failed_for_is_told_rather_than_who_is_silent_elsewhere(
    waited_in_vain, tmp_path, capsys
):
    store = waited_in_vain([0])
    Note.of(ValueError("this pack has no tokens"), 1).leave(tmp_path)
    assert Peers(tmp_path, Rank(0, 4, 0), None, store).note_failure(RuntimeError("Timed out waiting 9 ms")) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == "error: rank 1 failed: this pack has no tokens"


def test_ranks_of_another_host_than_that_of_rank_0_ask_nobody_for_the_store_may_be_out_of_reach(
    waited_in_vain, tmp_path, capsys
):
    store = waited_in_vain([2, 3])
    assert Peers(tmp_path, Rank(3, 4, 1), None, store).note_failure(RuntimeError("Timed out waiting 9 ms")) == 1
    assert capsys.readouterr().err == (
        f"error: rank 2 waited in vain in step 3, train (Timed out waiting 9 ms): no rank on {socket.gethostname()} "
        "hangs, so one on another host does, or is gone, or the network to it is down\n"
    )


def test_a_rank_of_another_host_that_lives_and_has_not_given_up_is_named_with_what_it_does(
    waited_in_vain, tmp_path, capsys, monkeypatch
):
    """It hangs, and no other rank of its host tells."""
    store = waited_in_vain([0, 1])
    monkeypatch.setattr(peers, "_ANSWER_SECONDS", 10.0)
    in_vain, over, roll = RuntimeError("Timed out waiting 9 ms"), threading.Event(), RollCall(store, 3, 4)
    RollCall(store, 2, 4).leave(Note.of(in_vain, 2))

    def live():
        while not over.wait(0.01):
            roll.answer()

    enter_step(7)
    living = threading.Thread(target=live)
    with commanded("train", ["policy"]):
        living.start()
        assert Peers(tmp_path, Rank(0, 4, 0), None, store).note_failure(in_vain) == 1
        over.set()
        living.join()
    enter_step(None)
    told = f"rank 3 on {socket.gethostname()} hangs in step 7, `train policy`: rank 1 waited in vain ({in_vain})"
    assert capsys.readouterr().err == f"error: {told}\n"


def test_hosts_hear_of_the_rank_that_another_one_ends(hanging, tmp_path):
    """Of which they would only see that it is gone."""
    store = dist.HashStore()
    others = RollCall(store, 0, 2)
    RollCall(store, 1, 2).enter()
    assert Peers(tmp_path, Rank(2, 4, 0), None, store).note_failure(RuntimeError("Timed out waiting 9 ms")) == 1
    told = f"rank 1 on {socket.gethostname()} failed: it hangs in `train policy`"
    assert others.why_one_is_lost(seconds=0).message == told


def test_a_rank_that_finds_itself_hanging_is_named_with_the_stacks_of_its_host(hanging, tmp_path, capsys):
    reports = tmp_path / "faults"
    error = RankStalledError("another rank is gone (Connection closed by peer), and it has not noticed for 30 s")
    assert Peers(tmp_path, Rank(1, 4, 1), reports, dist.HashStore()).note_failure(error) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: rank 1 hangs in `train policy`: {error}; stacks of the ranks on ")
    assert "<module>" in (reports / "1" / "rank_1.txt").read_text()


def test_other_errors_are_told_as_they_are_and_nobody_is_asked(hanging, tmp_path, capsys):
    assert Peers(tmp_path, Rank(0, 4, 0), None, dist.HashStore()).note_failure(ConfigError("use 1, 2 or 4")) == 2
    assert capsys.readouterr().err == "error: rank 0: use 1, 2 or 4\n"
    assert hanging.poll() is None


def test_an_error_that_all_ranks_share_is_told_by_rank_0_which_the_others_let_speak(tmp_path, capsys, monkeypatch):
    waits, shared = [], ConfigError("use 1, 2 or 4")
    shared.is_shared = True
    monkeypatch.setattr(peers.time, "sleep", waits.append)
    assert Peers(tmp_path, Rank(1, 4, 1), None, dist.HashStore()).note_failure(shared) == 2
    assert (waits, capsys.readouterr().err) == ([5.0], "")
    assert Peers(tmp_path, Rank(0, 4, 0), None, dist.HashStore()).note_failure(shared) == 2
    assert (waits, capsys.readouterr().err) == ([5.0], "error: use 1, 2 or 4\n")


def test_a_rank_that_waits_to_be_told_what_to_do_is_neither_blamed_nor_ended(tmp_path, capsys):
    body = WAITING.replace('with commanded("train", ["policy"]):\n    time', "enter_service()\ntime")
    body = body.replace("import be_watched, commanded", "import be_watched, enter_service")
    process = subprocess.Popen([sys.executable, "-c", body, str(tmp_path)])
    try:
        while not (Activity.read(tmp_path, 1) or Activity()).is_idle:
            assert process.poll() is None
        assert (
            Peers(tmp_path, Rank(0, 4, 0), None, dist.HashStore()).note_failure(RuntimeError("rank 9: timed out")) == 1
        )
        assert capsys.readouterr().err.startswith("error: rank 0 waited in vain (rank 9: timed out): no rank on ")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_without_the_folder_of_the_host_an_error_is_told_all_the_same(tmp_path, capsys):
    gone = tmp_path / "gone"
    assert Peers(gone, Rank(0, 4, 0), None, dist.HashStore()).note_failure(ConfigError("use 1, 2 or 4")) == 2
    assert capsys.readouterr().err == "error: rank 0: use 1, 2 or 4\n"
    assert (
        Peers(gone, Rank(1, 4, 1), None, dist.HashStore()).note_failure(RuntimeError("Connection closed by peer")) == 1
    )
    assert capsys.readouterr().err == "rank 1: another rank ended or hangs; its own message tells why\n"


def test_reports_that_cannot_be_written_do_not_hide_who_hangs(hanging, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert (
        Peers(tmp_path, Rank(0, 4, 0), tmp_path / "file", dist.HashStore()).note_failure(RuntimeError("Timed out")) == 1
    )
    assert "rank 1 hangs in `train policy`" in (told := capsys.readouterr().err)
    assert f"stacks could not be written to {tmp_path / 'file'}: " in told


def test_a_signal_to_any_rank_reaches_rank_0(monkeypatch):
    heard, store = threading.Event(), dist.HashStore()
    monkeypatch.setattr(peers, "be_watched", lambda rank, folder: None)
    before = signal.signal(signal.SIGTERM, lambda *_: heard.set())
    try:
        with watched(Rank(0, 4, 0), store), watched(Rank(2, 4, 0), store) as other:
            assert not heard.wait(0.2)
            other.pass_on(signal.SIGTERM)
            assert heard.wait(5)
        heard.clear()
        with watched(Rank(2, 4, 0), store):  # hears of nothing, whoever was sent it
            assert not heard.wait(1.5)
    finally:
        signal.signal(signal.SIGTERM, before)


TOLD_TWICE = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
from shardwise.controller import peers, signals
from shardwise.controller.process_group import Rank
peers._LEAVE_SECONDS, signals.COPIES_SECONDS = 0.0, float(sys.argv[1])
store = dist.HashStore()
rank = peers.Peers(Path(), Rank(1, 2, 1), None, store)
rank.pass_on(2)
time.sleep(0.1)
rank.pass_on(15)
print("lives on", store.get("stop").decode())
"""


@pytest.mark.parametrize(("copies_seconds", "code", "said"), [("60", 0, "lives on 15\n"), ("0.1", 143, "")])
def test_a_second_signal_that_is_no_copy_ends_a_rank_that_does_not_decide(copies_seconds, code, said):
    """It may hang, and torchrun, which sends the signal to all ranks of its host, waits for it."""
    ended = subprocess.run([sys.executable, "-c", TOLD_TWICE, copies_seconds], stdout=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stdout) == (code, said)


@pytest.fixture
def _often(monkeypatch):
    """A second is 20 ms."""
    monkeypatch.setattr(peers, "be_watched", lambda rank, folder: None)
    monkeypatch.setattr(peers, "_SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.setattr(peers, "_LEAST_SILENCE_SECONDS", 0.3)


@pytest.mark.usefixtures("_often")
def test_a_rank_ends_when_rank_0_has_given_no_sign_of_life_for_long(monkeypatch, capsys):
    """As where its host lost its power: no connection is closed, and who waits for a command is told nothing."""
    ended, store = threading.Event(), dist.HashStore()
    codes = []
    monkeypatch.setattr(peers.os, "_exit", lambda code: (codes.append(code), ended.set()))
    with watched(Rank(2, 4, 0), store, timeout_seconds=0.1):
        with watched(Rank(0, 4, 0), store):
            assert not ended.wait(1.0)
        assert ended.wait(5)
    assert codes == [1]
    assert capsys.readouterr().err.startswith("error: rank 2: rank 0 has given no sign of life for 0 s (engine.c")


@pytest.mark.usefixtures("_often")
def test_rank_0_ends_when_another_rank_has_given_no_sign_of_life_for_long(monkeypatch, capsys):
    """It may wait for that rank's part of a save, which no collective would."""
    ended, store, codes = threading.Event(), dist.HashStore(), []
    monkeypatch.setattr(peers, "_LATER_SECONDS", 0.2)
    monkeypatch.setattr(peers.os, "_exit", lambda code: (codes.append(code), ended.set()))
    with watched(Rank(0, 3, 0), store, timeout_seconds=0.1):
        with watched(Rank(1, 3, 1), store), watched(Rank(2, 3, 2), store):
            assert not ended.wait(1.0)
        assert not ended.wait(1.0), "they are done"
        RollCall(store, 2, 3).answer()
        with watched(Rank(1, 3, 1), store):
            assert ended.wait(5)
    assert codes == [1]
    host = socket.gethostname()
    assert capsys.readouterr().err.startswith(f"error: rank 2 on {host} has given no sign of life for 0 s (engine.c")


@pytest.mark.usefixtures("_often")
@pytest.mark.parametrize("breaks", ["fails", "hangs"])
def test_a_store_that_is_out_of_reach_is_silence_too(monkeypatch, breaks):
    ended, over = threading.Event(), threading.Event()

    class Store:
        def add(self, key, number):
            if breaks == "fails":
                raise RuntimeError("Connection reset by peer")
            over.wait(10)
            return 1

    began = time.monotonic()
    with peers._listening(Store(), RollCall(dist.HashStore(), 1, 2), 0.3, ended.set):
        assert ended.wait(5)
        assert time.monotonic() - began >= 0.3
        over.set()


@pytest.mark.usefixtures("_often")
def test_rank_0_gives_signs_after_it_was_sent_a_signal_too(monkeypatch):
    """It saves then, which takes its time."""
    store, sent = dist.HashStore(), []
    monkeypatch.setattr(peers.os, "kill", lambda pid, number: sent.append(number))
    store.set("stop", "15")
    with watched(Rank(0, 4, 0), store):
        deadline = time.monotonic() + 5
        while store.add("signs_of_life", 0) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert sent == [15]


@pytest.mark.parametrize("group", [None, "3"])
def test_the_ranks_of_a_host_find_the_folder_of_its_first(monkeypatch, group):
    monkeypatch.delenv("GROUP_RANK", raising=False)
    if group:
        monkeypatch.setenv("GROUP_RANK", group)
    monkeypatch.setattr(peers, "be_watched", lambda rank, folder: seen.append((rank, folder.is_dir(), folder)))
    seen, store = [], dist.HashStore()
    with watched(Rank(8, 16, 0), store), watched(Rank(9, 16, 1), store):
        pass
    (first, was_there, folder), second = seen
    assert (first, was_there) == (8, True)
    assert second == (9, True, folder)
    assert not folder.exists()
    assert os.environ.get("GROUP_RANK") == group


@pytest.fixture
def asked(_often, monkeypatch):
    """How long rank 0 gave all to answer, each time that it asked them; all live."""
    asked = []
    monkeypatch.setattr(peers, "_LEAVE_SECONDS", 0.02)
    monkeypatch.setattr(RollCall, "why_one_is_lost", lambda roll, seconds: asked.append(seconds))
    return asked


def test_all_are_asked_once_for_each_loss_that_is_reported(asked):
    """A rank that lives may have closed a connection all the same."""
    store = dist.HashStore()
    with watched(Rank(0, 3, 0), store):
        for number in (1, 2):
            RollCall(store, number, 3).report_loss()
            deadline = time.monotonic() + 5
            while len(asked) < number:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.3)
            assert len(asked) == number


def test_of_a_loss_that_the_main_thread_tells_nobody_is_asked(asked):
    store = dist.HashStore()
    with watched(Rank(0, 3, 0), store):
        RollCall(store, 0, 3).leave(Note.of(RuntimeError("Connection closed by peer"), 0))
        RollCall(store, 1, 3).report_loss()
        time.sleep(0.3)
    assert not asked
