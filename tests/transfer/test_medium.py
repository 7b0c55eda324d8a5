"""The contract of every medium, between real processes that have no default process group. A new one adds itself to
MEDIA."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ends import DictReceiver, DictSender, Died, kill_self, on, random_weights, run_ends, same, stop_self

from shardwise.config import UserError
from shardwise.transfer import (
    DiskMedium,
    MediumError,
    ProcessGroupMedium,
    SharedMemoryMedium,
    WeightSyncError,
    pull_weights,
    push_weights,
)
from shardwise.transfer.medium import EndLostError, Rendezvous
from shardwise.transfer.receipt import NotFiniteWeightsError

MEDIA: dict[str, Any] = {"process group": ProcessGroupMedium, "shared memory": SharedMemoryMedium, "disk": DiskMedium}
NOTICES_DEATH = {"process group", "shared memory"}
"""Media that notice at once when an end is gone. On a disk it is only silent."""

VERSION_IN_MID_SYNC = {"process group": None, "shared memory": None, "disk": 0}
"""Of a receiver whose sender fails: on a disk it has not begun to read, and serves what it served."""

TIMEOUT_SECONDS = 4


@pytest.fixture(params=list(MEDIA))
def medium(request):
    return request.param


@pytest.fixture
def run(medium, tmp_path):
    """`run(push, pull, ...)`: as run_ends, over one of the media."""
    folder = {"folder": tmp_path / "weights", "run": "/run"} if medium == "disk" else {}
    return lambda *ends: run_ends([partial(end, MEDIA[medium], folder) for end in ends], tmp_path)


def nothing(name: str) -> None:
    pass


def push(medium, folder, join, *, before=nothing, tamper=nothing, num_syncs=1, timeout_seconds=20):
    """The receipts; or the error and the seconds after which it came."""
    end = join(medium, timeout=timedelta(seconds=timeout_seconds), **folder)
    started, receipts = time.monotonic(), []
    try:
        for version in range(1, num_syncs + 1):
            weights = random_weights(version)
            tamper(weights)
            sender = DictSender(weights, before)
            receipts.append(push_weights(sender.named_weights(torch.bfloat16), end, version=version, bucket_bytes=4096))
        return receipts
    except WeightSyncError as error:
        return error, time.monotonic() - started


def pull(medium, folder, join, *, before=nothing, num_syncs=1, timeout_seconds=20, version=None):
    """The receipts; or the error and the version that the engine would generate with."""
    end = join(medium, timeout=timedelta(seconds=timeout_seconds), **folder)
    receiver, receipts = DictReceiver(random_weights(0), before), []
    try:
        for expected in range(1, num_syncs + 1):
            receipts.append(pull_weights(receiver, end, version=version))
            assert same(receiver.weights, random_weights(expected)), "other weights arrived"
            assert receiver.version == expected
        return receipts
    except WeightSyncError as error:
        return error, receiver.version


def test_trap_29_every_receiver_holds_what_was_sent_and_all_receipts_are_equal(run):
    sent, *received = run(partial(push, num_syncs=3), partial(pull, num_syncs=3), partial(pull, num_syncs=3))
    assert received == [sent, sent]
    weights = random_weights(3)
    assert [receipt.version for receipt in sent] == [1, 2, 3]
    assert sent[2].num_tensors == received[0][2].num_proven == len(weights)
    assert sent[2].num_bytes == sum(tensor.nbytes for tensor in weights.values())
    assert sent[1].digest != sent[2].digest


def drop_norm(weights) -> None:
    del weights["norm"]


def reshape_norm(weights) -> None:
    weights["norm"] = weights["norm"].view(3, 11)


def rename_norm(weights) -> None:
    weights["rmsnorm"] = weights.pop("norm")


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (drop_norm, "the engine serves norm, which was not sent"),
        (reshape_norm, "norm was sent as torch.bfloat16 [3, 11], the engine serves torch.bfloat16 [33]"),
        (rename_norm, "rmsnorm was sent, which the engine does not serve"),
    ],
)
def test_f40_weights_that_do_not_fit_are_named_at_every_end_and_nothing_is_committed(run, tamper, named):
    (at_sender, _), *received = run(partial(push, tamper=tamper), pull, pull)
    assert str(at_sender) == f"weight sync 1 failed at receiver 1: weight sync 1: {named}"
    assert [(str(error), version) for error, version in received] == 2 * [(f"weight sync 1: {named}", None)]


def test_one_receiver_that_refuses_stops_the_others_from_committing(run):
    (at_sender, _), refusing, other = run(push, partial(pull, version=7), pull)
    assert str(refusing[0]) == "weight sync 1: version 7 is due, but version 1 came"
    for error in (at_sender, other[0]):
        assert str(error) == f"weight sync 1 failed at receiver 1: {refusing[0]}"
    assert (refusing[1], other[1]) == (0, None)  # the one that refused took no tensor: it serves what it served


def spoil_norm(weights) -> None:
    weights["norm"][3] = float("nan")


def test_weights_that_are_not_finite_are_refused_in_the_same_words_at_every_end_and_not_committed(run):
    (at_sender, _), *received = run(partial(push, tamper=spoil_norm), pull, pull)
    assert isinstance(at_sender, UserError), "the same command would do no better"
    assert str(at_sender).startswith(
        "weight sync 1: norm holds values that are not finite: training has diverged; lower"
    )
    said = (NotFiniteWeightsError, str(at_sender))
    assert [(type(error), str(error)) for error, _ in received] == 2 * [said]
    assert all(version in (0, None) for _, version in received)


def fail() -> None:
    raise OSError("no such shard")


def push_and_fail(medium, folder, join):
    """The sender's own error goes on as it is."""
    with pytest.raises(OSError, match="no such shard"):
        push(medium, folder, join, before=on("empty", fail))


def test_a_sender_that_fails_says_so_to_its_receivers(run, medium):
    _, received = run(push_and_fail, pull)
    assert str(received[0]) == "weight sync 1: the sender gave up: OSError: no such shard"
    assert received[1] == VERSION_IN_MID_SYNC[medium]


LOST = [
    *(pytest.param(name, kill_self, id=f"{name}-killed") for name in MEDIA),
    pytest.param("process group", stop_self, id="process group-stopped"),
    *(
        pytest.param(name, stop_self, id=f"{name}-stopped", marks=pytest.mark.full)
        for name in ("shared memory", "disk")
    ),
]


@pytest.mark.parametrize(("medium", "act"), LOST, indirect=["medium"])
def test_trap_29_a_receiver_lost_in_mid_sync_is_named_within_the_timeout(run, medium, act):
    lost = partial(pull, before=on("experts", act), timeout_seconds=TIMEOUT_SECONDS)
    ends = [partial(push, timeout_seconds=TIMEOUT_SECONDS), lost, partial(pull, timeout_seconds=TIMEOUT_SECONDS)]
    (at_sender, seconds), gone, (at_other, version) = run(*ends)
    assert isinstance(gone, Died)
    assert isinstance(at_sender, MediumError)
    assert isinstance(at_other, MediumError)
    for error in (at_sender, at_other):
        assert "receiver 1" in str(error)
        assert "receiver 2" not in str(error)
    # Two seconds to ask who is still there, and what the sync itself takes.
    assert seconds < (0 if act is kill_self and medium in NOTICES_DEATH else TIMEOUT_SECONDS) + 4
    assert version is None


@pytest.mark.parametrize(("medium", "act"), LOST, indirect=["medium"])
def test_trap_29_a_sender_lost_in_mid_sync_is_named_and_no_receiver_commits(run, medium, act):
    ends = [partial(push, before=on("empty", act), timeout_seconds=TIMEOUT_SECONDS)]
    gone, *received = run(*ends, *2 * [partial(pull, timeout_seconds=TIMEOUT_SECONDS)])
    assert isinstance(gone, Died)
    for error, version in received:
        assert isinstance(error, MediumError)
        assert str(error).endswith("nothing was heard from the sender")
        assert version == VERSION_IN_MID_SYNC[medium]


@pytest.fixture(params=["hash", "file", "tcp"])
def open_store(request, tmp_path):
    """Opens a connection to one store, of each kind that ends meet in."""
    if request.param == "hash":
        store = dist.HashStore()
        return lambda: store
    if request.param == "file":
        return lambda: dist.FileStore(str(tmp_path / "store"), 3)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)


def test_ends_meet_in_every_store_and_name_those_that_do_not_come(open_store):
    timeout = timedelta(seconds=2)
    ends = [Rendezvous(dist.PrefixStore("weights", open_store()), rank, 3, timeout=timeout) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for number in range(3):
            heard = threads.map(lambda end, number=number: end.meet("meeting", f"{number} é {end._rank}"), ends)
            assert list(heard) == [[f"{number} é {rank}" for rank in range(3)]] * 3
    with pytest.raises(EndLostError, match=r"^alone: waited 2 s for the sender and receiver 2$"):
        ends[1].meet("alone", "here")
    assert ends[2].break_off("why") == [None, None, "why"]


class CountingStore(dist.Store):
    """A HashStore that notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self._store, self.asked = dist.HashStore(), []

    def _noted(self, verb, *args):
        self.asked.append(verb)
        return getattr(self._store, verb)(*args)

    def set(self, key, value):
        self._noted("set", key, value)

    def get(self, key):
        return self._noted("get", key)

    def check(self, keys):
        return self._noted("check", keys)

    def wait(self, keys, timeout):
        self._noted("wait", keys, timeout)

    def multi_get(self, keys):
        return self._noted("multi_get", keys)


def test_a_meeting_asks_the_store_as_often_for_many_ends_as_for_two():
    store = CountingStore()
    for rank in range(1, 100):
        store.set(f"rendezvous/0/{rank}", f"of {rank}")
    store.asked.clear()
    end = Rendezvous(store, 0, 100, timeout=timedelta(seconds=5))
    assert end.meet("meeting", "of 0") == [f"of {rank}" for rank in range(100)]
    assert store.asked == ["set", "wait", "multi_get"]
