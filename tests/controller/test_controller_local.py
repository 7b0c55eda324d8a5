"""RankGroup on two real ranks; the commands are in conftest.py."""

import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from ranks import call_store

from shardwise.controller.base import RankSilentError
from shardwise.controller.launch import launch
from shardwise.controller.local import RankGroup, serve, serve_in_background
from shardwise.controller.process_group import Rank, connect, process_group
from shardwise.controller.stall import StallLimit, watching_itself

ROOT = Path(__file__).parents[2]


def test_call_gives_every_rank_the_same_arguments(two_rank_results):
    assert two_rank_results["size"] == 2
    assert two_rank_results["call"] == [7, 1007]
    assert two_rank_results["none"] == [None, None]


def test_scatter_gives_every_rank_its_shard_and_the_common_arguments(two_rank_results):
    assert two_rank_results["scatter"] == [[15.0, 25.0], [-30.0]]
    assert two_rank_results["large"] == [2e6, 4e6]


def test_nouns_travel_both_ways(two_rank_results):
    assert two_rank_results["noun"] == [3.5, 7.0]


def test_ranks_work_on_a_command_at_the_same_time(two_rank_results):
    """Each sends the other its shard: were rank 0 to finish before it commands rank 1, neither would return."""
    assert two_rank_results["swap"] == [22.0, 11.0]


def test_commands_arrive_once_and_in_order_and_shutdown_ends_the_loop(two_rank_results):
    first, second = two_rank_results["history"]
    assert first == [["add", 3, 4], ["scale", [1.5, 2.5], 10]]
    assert second == [["add", 3, 4], ["scale", [-3.0], 10]]
    assert two_rank_results["served"] == "left the loop"


def test_every_rank_is_in_the_step_that_rank_0_says(two_rank_results):
    assert two_rank_results["steps"] == [[None, None], [6, 6], [7, 7]]


def test_a_save_that_fails_on_every_rank_is_raised_and_they_all_serve_on(two_rank_results):
    """Were the answer of rank 1 left in the pipe, the next command would get it."""
    assert two_rank_results["save"] == "/full cannot be written on rank 0"
    assert two_rank_results["call"] == [7, 1007]


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, number, factor=1):
        self.total += number * factor
        return self.total


def test_a_group_of_one_calls_its_worker_directly():
    with process_group(Rank(0, 1, 0), device_type="cpu", timeout_seconds=5) as control:
        group = RankGroup(Counter(), control, timeout_seconds=20)
        assert group.size == 1
        assert group.call("add", 4) == [4]
        assert group.scatter("add", [5], 10) == [54]
        with pytest.raises(AssertionError, match=r"\(2, 1\)"):
            group.scatter("add", [1, 2])
        group.shutdown()
    assert torch.distributed.is_initialized() is False


class Sleeper:
    num_calls = 0

    def sleep(self, seconds):
        self.num_calls += 1
        time.sleep(seconds * torch.distributed.get_rank())
        return self.num_calls


def sleep_in_both_groups():
    """Of rank 0: what became of a call of part of a group and of one beside it; rank 1 sleeps longer in it than the
    part's deadline."""
    store, rank = call_store(), Rank(torch.distributed.get_rank(), 2, 0)
    links = connect("beside", rank, store, timeout=timedelta(seconds=20))
    control = connect("control", rank, store, timeout=timedelta(seconds=20))
    if rank.rank == 1:
        beside = serve_in_background(Sleeper(), links, print)
        serve(Sleeper(), control)
        beside.join()
        return None
    background = RankGroup(Sleeper(), links, timeout_seconds=20, timeout_key="long")
    whole = RankGroup(Sleeper(), control, timeout_seconds=20, background=background)
    part = whole.part(0, 2, timeout_seconds=1, timeout_key="short")
    answers = part.background.call("sleep", 2), part.call("sleep", 0)
    whole.shutdown()
    return answers


def test_calls_beside_a_part_keep_the_deadline_of_the_whole(run_ranks):
    assert run_ranks(sleep_in_both_groups, 2)[0] == ([1, 1], [1, 1])


def shut_down_under_calls(seconds, timeout_seconds):
    """Of rank 0: what two calls of a part answered in a thread, and what became of the end of the whole, which comes
    during the first. Of rank 1: how many it heard of."""
    worker, rank = Sleeper(), Rank(torch.distributed.get_rank(), 2, 0)
    control = connect("control", rank, call_store(), timeout=timedelta(seconds=20))
    if rank.rank == 1:
        serve(worker, control)
        return worker.num_calls
    whole = RankGroup(worker, control, timeout_seconds=timeout_seconds, timeout_key="short")
    part, answers = whole.part(1, 2, timeout_seconds=20, timeout_key="long"), []

    def sample():
        for seconds_asleep in (seconds, 0):
            answers.append(part.call("sleep", seconds_asleep))

    sampling = threading.Thread(target=sample, daemon=True)
    sampling.start()
    time.sleep(seconds / 4)
    try:
        whole.shutdown()
        failure = None
        sampling.join(0.5)  # for good, where its second call comes after the end
    except RankSilentError as error:
        failure = str(error)
        sampling.join()
        whole.shutdown()
    return answers, failure


def test_the_end_waits_for_a_call_of_another_thread_and_is_no_part_of_the_next(run_ranks):
    """Mixed messages of two commands would be read as one. Which of the end and the second call comes first is open."""
    (answers, failure), num_heard = run_ranks(shut_down_under_calls, 2, 1.0, 10)
    assert failure is None
    assert answers == [[1], [2]][:num_heard]


def test_the_end_names_the_rank_that_a_call_of_another_thread_keeps_for_longer_than_it_may(run_ranks):
    (answers, failure), num_heard = run_ranks(shut_down_under_calls, 2, 3.0, 1)
    assert failure == "rank 1 did not take `shutdown` within 1 s (short); it hangs, or if it is only slow, raise that"
    assert (answers, num_heard) == ([[1], [2]], 2)


def shut_down_a_rank_that_is_elsewhere():
    """Of rank 0: what became of it."""
    control = connect("control", Rank(torch.distributed.get_rank(), 2, 0), call_store(), timeout=timedelta(seconds=20))
    if torch.distributed.get_rank() == 0:
        with pytest.raises(RankSilentError) as raised:
            RankGroup(Sleeper(), control, timeout_seconds=1, timeout_key="short").shutdown()
        torch.distributed.barrier()
        return str(raised.value)
    torch.distributed.barrier()
    return None


def test_the_end_names_a_rank_that_does_not_serve(run_ranks):
    failure, _ = run_ranks(shut_down_a_rank_that_is_elsewhere, 2)
    assert failure == "rank 1 did not take `shutdown` within 1 s (short); it hangs, or if it is only slow, raise that"


def sleep_within_a_stall_limit(first):
    """Of rank 0: what the stall clock said while rank 1 slept for longer than it allows, in the group of the ranks from
    `first`."""
    control, stalls = torch.distributed.group.WORLD, []
    if torch.distributed.get_rank() == 1:
        serve(Sleeper(), control)
        return None
    whole = RankGroup(Sleeper(), control, timeout_seconds=20)
    part = whole.part(first, 2, timeout_seconds=5, timeout_key="short")
    with watching_itself(StallLimit(0.5, "stall"), stalls.append):
        part.call("sleep", 1.5)
    whole.shutdown()
    return [str(error) for error in stalls]


def test_rank_0_that_waits_for_ranks_with_a_deadline_of_their_own_does_not_stall(run_ranks):
    """In a group with rank 0, whose own part of a call has no deadline, it does."""
    assert run_ranks(sleep_within_a_stall_limit, 2, 1)[0] == []
    (told,) = run_ranks(sleep_within_a_stall_limit, 2, 0)[0]
    assert "(stall=0.5)" in told


HANGING = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from shardwise.controller.failures import note_failure
from shardwise.controller.launch import die_with_launcher
from shardwise.controller.local import RankGroup, serve
from shardwise.controller.process_group import Rank, process_group
from shardwise.controller.watchdog import be_watched


class Worker:
    def hang(self):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    def hang_in_collective(self):
        self.hang()
        dist.all_reduce(torch.zeros(1))


rank = Rank.from_environment()
die_with_launcher()
be_watched(rank.rank)
with process_group(rank, device_type="cpu", timeout_seconds=2) as control:
    try:
        if rank.rank != 0:
            serve(Worker(), control)
        else:
            RankGroup(Worker(), control, timeout_seconds=2).call(sys.argv[2])
    except Exception as error:
        code = note_failure(error, rank.rank)
        sys.stderr.flush()
        os._exit(code)
"""


@pytest.mark.parametrize(
    ("method", "message", "stack"),
    [
        ("hang", "rank 1 did not answer `hang` within 2 s (engine.collective_timeout_seconds)", "did not answer"),
        ("hang_in_collective", "Timed out waiting", "in hang_in_collective"),
    ],
)
def test_f3_a_rank_that_is_stopped_is_named_within_its_deadline(tmp_path, capfd, method, message, stack):
    script = tmp_path / "rank.py"
    script.write_text(HANGING)
    started = time.monotonic()
    assert launch([sys.executable, str(script), str(ROOT), method], nproc=2, faults=tmp_path / "faults") == 1
    assert time.monotonic() - started < 30  # two seconds of waiting, two for its stacks, and starting torch twice
    error = capfd.readouterr().err
    assert f"error: rank 1 hangs in `{method}` and is stopped (SIGSTOP): rank 0 waited in vain (" in error
    assert message in error
    assert error.endswith(f"; stacks of every rank: {tmp_path / 'faults' / '1'}\n")
    assert "Traceback" not in error
    report = (tmp_path / "faults" / "1" / "rank_0.txt").read_text()
    assert stack in report
    assert "in note_failure" in report  # had it left, the others might have failed or gone on
    assert "is stopped (SIGSTOP)" in (tmp_path / "faults" / "1" / "rank_1.txt").read_text()


class Listener:
    def __init__(self) -> None:
        self.rank, self.heard = torch.distributed.get_rank(), []

    def hear(self, shard, common):
        self.heard.append([shard.tolist(), common])
        return 100 * self.rank + int(shard.sum())

    def recall(self):
        return self.heard


def scatter_shards(num_shards):
    """Of four ranks: the results of a scatter, and what each rank was given."""
    worker, control = Listener(), torch.distributed.group.WORLD
    if torch.distributed.get_rank() != 0:
        serve(worker, control)
        return None
    group = RankGroup(worker, control, timeout_seconds=20)
    shards = [torch.tensor([1 + index, 10]) for index in range(num_shards)]
    found = group.scatter("hear", shards, "all"), group.call("recall")
    with pytest.raises(AssertionError, match=r"\(3, 4\)"):
        group.scatter("hear", shards[:1] * 3, "all")
    group.shutdown()
    return found


@pytest.mark.parametrize(
    ("num_shards", "results", "heard"),
    [
        (4, [11, 112, 213, 314], [1, 2, 3, 4]),
        (2, [11, 212], [1, 1, 2, 2]),
        (1, [11], [1, 1, 1, 1]),
    ],
)
def test_neighbouring_ranks_share_a_shard_and_the_first_of_them_answers(run_ranks, num_shards, results, heard):
    """Ranks of one sequence (engine.ulysses_size) are neighbours too."""
    found, _, _, _ = run_ranks(scatter_shards, 4, num_shards)
    assert found == (results, [[[[first, 10], "all"]] for first in heard])


@pytest.mark.parametrize("num_shards", [4, 2, 1])
def test_a_shard_is_encoded_once_for_all_ranks_that_share_it(monkeypatch, num_shards):
    encoded = []
    monkeypatch.setattr("shardwise.controller.local.encode", lambda value: encoded.append(value) or torch.zeros(1))
    group = RankGroup(None, Mock(size=lambda: 4), timeout_seconds=20)
    monkeypatch.setattr(group, "_run", lambda method, messages, own_args: messages)
    group.scatter("hear", list(range(num_shards)), "all")
    assert [args for _, _, args in encoded] == [[shard, "all"] for shard in range(num_shards)]


class Meeting:
    """Rank 1 comes to serve once rank 2 has worked on a command."""

    def __init__(self, store) -> None:
        self._store = store

    def work(self):
        self._store.set(f"worked/{torch.distributed.get_rank()}", "")
        return torch.distributed.get_rank()


def begin_to_serve_late():
    """Of rank 0: the answers to a call that rank 1 takes after rank 2 has worked on it."""
    store = call_store()
    worker, control = Meeting(store), torch.distributed.group.WORLD
    if torch.distributed.get_rank() == 1:
        store.wait(["worked/2"], timedelta(seconds=10))
    if torch.distributed.get_rank() != 0:
        serve(worker, control)
        return None
    group = RankGroup(worker, control, timeout_seconds=20)
    answers = group.call("work")
    group.shutdown()
    return answers


def test_a_rank_that_is_late_to_take_a_command_keeps_no_other_from_it(run_ranks):
    assert run_ranks(begin_to_serve_late, 3)[0] == [0, 1, 2]


class Journal:
    """Connections that keep a journal of what begins and what is waited for."""

    def __init__(self, control) -> None:
        self._control, self.lines = control, []

    def size(self):
        return self._control.size()

    def send(self, tensors, rank, tag):
        return self._noted("send", tensors, rank, tag)

    def recv(self, tensors, rank, tag):
        return self._noted("recv", tensors, rank, tag)

    def _noted(self, verb, tensors, rank, tag):
        work = getattr(self._control, verb)(tensors, rank, tag)
        self.lines.append(f"{verb} {rank}")
        return Mock(wait=lambda timeout: self.lines.append(f"wait {rank}") or work.wait(timeout))


def keep_a_journal():
    """Of rank 0: that of a call of three ranks."""
    control = torch.distributed.group.WORLD
    if torch.distributed.get_rank() != 0:
        serve(Counter(), control)
        return None
    journal = Journal(control)
    assert RankGroup(Counter(), journal, timeout_seconds=20).call("add", 4) == [4, 4, 4]
    RankGroup(Counter(), control, timeout_seconds=20).shutdown()
    return journal.lines


def test_ranks_are_told_and_answer_at_the_same_time_and_are_waited_for_in_turn(run_ranks):
    """Were each waited for before the next is told or heard, a call would take a round trip for each."""
    told = [*("send 1", "send 1", "send 2", "send 2"), *("wait 1", "wait 1", "wait 2", "wait 2")]
    sizes = ["recv 1", "recv 2", "wait 1", "recv 1", "wait 2", "recv 2"]
    assert run_ranks(keep_a_journal, 3)[0] == [*told, *sizes, "wait 1", "wait 2"]
