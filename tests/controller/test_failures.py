"""Which of the things that ranks say and do is the cause. What `launch` makes of it is in test_launch.py."""

import signal

import pytest

from shardwise.config import DataError, EngineLostError, JudgeLostError, PeerLostError
from shardwise.controller.base import RankSilentError, RankStalledError
from shardwise.controller.failures import Note, explain, num_killed_for_memory

PLACES = {0: "step 3, train, `train policy`", 1: "step 3, `train policy`"}


def reason(codes, notes=(), states=None, num_killed=0, **others):
    return explain(codes, notes, PLACES, states or {}, num_killed=num_killed, **others)


@pytest.mark.parametrize(
    ("error", "flags"),
    [
        (DataError("the timeout of the peer"), (True, False, False)),
        (PermissionError(13, "Permission denied", "run/peer.jsonl"), (True, False, False)),
        (RankSilentError("rank 1 did not answer"), (False, True, True)),
        (RuntimeError("Timed out waiting 2000ms for recv operation"), (False, True, True)),
        (RuntimeError("Connection closed by peer"), (False, True, False)),
        (PeerLostError("weight sync 3: receiver 1 has closed"), (False, True, False)),
        (PeerLostError("weight sync 3: waited 2.5 s for receiver 1"), (False, True, True)),
        (EngineLostError("it last printed: the timeout of the peer"), (False, False, False)),
        (JudgeLostError("cannot connect to judge: Connection refused"), (False, False, False)),
        (KeyError("step"), (False, False, False)),
    ],
)
def test_a_note_tells_mistakes_lost_peers_and_hangs_apart(error, flags):
    note = Note.of(error, 0)
    assert (note.is_user_error, note.is_lost_peer, note.is_timeout) == flags


def test_an_outage_of_a_judge_is_told_without_a_traceback_and_may_pass():
    note = Note.of(JudgeLostError("reward judge cannot be reached"), 0)
    assert note.traceback == ""
    failure = reason({0: 1}, [note])
    assert (failure.code, failure.may_pass) == (1, True)
    assert "reward judge cannot be reached" in failure.message


def test_a_signal_is_named_with_the_place_and_may_pass():
    failure = reason({1: -signal.SIGSEGV, 0: 1}, [Note.of(RuntimeError("Connection closed by peer"), 0)])
    assert failure.message == "rank 1 was ended by SIGSEGV in step 3, `train policy`; the other ranks were stopped"
    assert (failure.code, failure.may_pass) == (1, True)


def test_a_rank_that_told_its_error_and_crashed_on_its_way_out_is_not_the_cause():
    note = Note.of(RuntimeError("Connection closed by peer"), 0)
    assert reason({0: -signal.SIGABRT, 1: -signal.SIGKILL}, [note]).message.startswith("rank 1 was ended by SIGKILL")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_somebody_stopped_is_not_started_again(number):
    failure = reason({0: -number})
    assert (failure.code, failure.may_pass) == (128 + number, False)


def test_f13_a_kill_for_want_of_memory_is_named(monkeypatch, tmp_path):
    counts = tmp_path / "vmstat"
    monkeypatch.setattr("shardwise.controller.failures._VMSTAT", counts)
    assert num_killed_for_memory() == 0
    counts.write_text("nr_free_pages 5\noom_kill 7\n")
    assert num_killed_for_memory() == 7
    killed = {1: -signal.SIGKILL}
    assert "SIGKILL (out of memory: the kernel ended it) in step 3" in reason(killed, num_killed=1).message
    assert "memory" not in reason(killed).message
    assert "memory" not in reason({1: -signal.SIGSEGV}, num_killed=1).message


def test_a_rank_that_hangs_is_named_with_its_place_and_state():
    note = Note.of(RuntimeError("Timed out waiting\n2000ms"), 0)
    failure = reason({}, [note], {1: "is stopped (SIGSTOP)"})  # rank 0 has not left yet
    assert failure.message == (
        "rank 1 hangs in step 3, `train policy` and is stopped (SIGSTOP): rank 0 waited in vain (Timed out waiting "
        "2000ms)"
    )
    assert failure.may_pass


def test_a_rank_that_waits_to_be_told_what_to_do_does_not_hang():
    note = Note.of(RankSilentError("a save in the background was not done within 3 s"), 0)
    assert reason({}, [note], idle={1}).message == (
        "rank 0 failed in step 3, train, `train policy`: a save in the background was not done within 3 s"
    )


def test_an_error_is_told_before_those_of_peers_and_a_mistake_does_not_pass():
    notes = [Note.of(DataError("row 3"), 1), Note.of(RuntimeError("Connection closed by peer"), 0)]
    failure = reason({0: 1, 1: 2}, notes)
    assert (failure.message, failure.code, failure.may_pass) == ("row 3", 2, False)
    failure = reason({1: 1}, [Note.of(KeyError("x"), 1)])
    assert failure.message == "rank 1 failed in step 3, `train policy`: 'x'"
    assert "KeyError" in failure.traceback


def test_f03_a_stall_is_of_rank_0_unless_it_waits_for_a_rank_that_is_stopped():
    note = Note.of(RankStalledError("rank 0 has not gone on for 9 s"), 0)
    assert (note.is_lost_peer, note.is_timeout, note.is_stalled, note.traceback) == (False, False, True, "")
    assert reason({}, [note]).message == (
        "rank 0 hangs in step 3, train, `train policy`: rank 0 has not gone on for 9 s"
    )
    stopped = {0: "is stopped (SIGSTOP)"}
    assert reason({}, [note], stopped, idle={1}).message.startswith(
        "rank 0 hangs in step 3, train, `train policy` and is stopped (SIGSTOP): "
    )
    stopped = {1: "is stopped (SIGSTOP)"}
    assert reason({}, [note], stopped).message == (
        "rank 1 hangs in step 3, `train policy` and is stopped (SIGSTOP): rank 0 has not gone on for 9 s"
    )
    assert reason({}, [note], stopped, idle={1}).message.startswith("rank 0 hangs")
