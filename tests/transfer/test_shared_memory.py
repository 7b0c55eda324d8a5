"""What is of shared memory alone."""

import fcntl
import json
import os
import resource
import socket
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from itertools import chain
from pathlib import Path

import pytest
import torch
from ends import DictReceiver, DictSender, random_weights, run_ends

from shardwise.config import ConfigError
from shardwise.transfer import MediumError, SharedMemoryMedium, pull_weights, push_weights
from shardwise.transfer import shared_memory as module


def push(join):
    medium = join(SharedMemoryMedium)
    for version in range(1, 20):
        push_weights(
            DictSender(random_weights(1)).named_weights(torch.bfloat16), medium, version=version, bucket_bytes=4096
        )
    # Buckets of another size need other slots, which have to be mapped anew.
    push_weights(DictSender(random_weights(1)).named_weights(torch.bfloat16), medium, version=20, bucket_bytes=1 << 16)
    return len(os.listdir("/proc/self/fd"))


def pull(join):
    medium, receiver, open_files = join(SharedMemoryMedium), DictReceiver(random_weights(0)), []
    for version in range(1, 21):
        pull_weights(receiver, medium, version=version)
        open_files.append(len(os.listdir("/proc/self/fd")))
    maps = [line.rstrip() for line in Path("/proc/self/maps").read_text().splitlines() if "shardwise-weights" in line]
    return open_files, maps


def test_no_sync_leaves_files_or_mappings_behind(tmp_path):
    before = ours()
    _, (open_files, maps) = run_ends([push, pull], tmp_path)
    assert len(set(open_files[1:])) == 1
    assert len(maps) == 2
    assert all(line.endswith("(deleted)") for line in maps)  # memory without a name
    assert not {path for path in ours() - before if not is_in_use(path)}


def ours() -> set[Path]:
    return {path for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob("shardwise-*")}


def is_in_use(path: Path) -> bool:
    """By another process on this machine, which locks it; or it has just been removed."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def join_from_another_host(join):
    """Another boot is another host, or the same one at another time."""
    boot_id = Path(f"/tmp/shardwise-test-boot-id-{os.getpid()}")
    boot_id.write_text("another")
    module._BOOT_ID = boot_id
    try:
        return join_and_fail(join)
    finally:
        boot_id.unlink()


def join_and_fail(join):
    with pytest.raises(ConfigError, match="use process_group between hosts") as caught:
        join(SharedMemoryMedium)
    return str(caught.value)


def test_ends_on_different_hosts_are_told_to_use_something_else(tmp_path):
    at_sender, at_receiver = run_ends([join_and_fail, join_from_another_host], tmp_path)
    assert at_sender == at_receiver
    assert at_sender.startswith(
        "rollout.placement.medium=shared_memory connects processes of one host, but the sender is on "
    )


def connect_and_say_nothing(address, rank, **_):
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.connect(address)
    return {0: peer}


def join_without_a_word(join):
    module._connect = connect_and_say_nothing
    return join_in_vain(join, timeout_seconds=4)  # the connection stays open for longer than the sender waits


def join_in_vain(join, timeout_seconds=1):
    with pytest.raises(MediumError) as caught:
        join(SharedMemoryMedium, timeout=timedelta(seconds=timeout_seconds))
    return str(caught.value)


def test_an_end_that_connects_and_says_nothing_is_named_within_the_timeout(tmp_path):
    at_sender, _ = run_ends([join_in_vain, join_without_a_word], tmp_path)
    assert at_sender == "joining shared memory: receiver 1 did not connect (timed out)"


@pytest.mark.parametrize(("num_receivers", "characters"), [(1000, 250), (100, 2000)], ids=["receipts", "failures"])
def test_a_meeting_takes_as_many_receivers_as_there_are(num_receivers, characters):
    """Receipts of 1,000 receivers, and failures of 100 (2,000 characters each), are more than a packet holds. Threads
    stand for processes."""
    with ExitStack() as stack:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num_receivers)]
        for end in chain.from_iterable(pairs):
            stack.enter_context(end)

        def end_of(peers):
            options = {"size": num_receivers + 1, "timeout": timedelta(seconds=20), "device": torch.device("cpu")}
            return SharedMemoryMedium(None, peers, **options)

        sender = end_of({rank: ours for rank, (ours, _) in enumerate(pairs, start=1)})
        receivers = [end_of({0: theirs}) for _, theirs in pairs]
        messages = [f"{rank} ".ljust(characters, ".") for rank in range(num_receivers + 1)]

        def hears_all(receiver, message):
            return receiver.meet("x", message) == messages

        threads = stack.enter_context(ThreadPoolExecutor(num_receivers))
        heard = threads.map(hears_all, receivers, messages[1:])
        assert sender.meet("x", messages[0]) == messages
        assert all(heard)


def ends_on_a_gpu(num_receivers):
    """A sender and its receivers as they are where buckets lie on a GPU, without one."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num_receivers)]
    options = {"size": num_receivers + 1, "timeout": timedelta(seconds=20), "device": torch.device("cuda")}
    sender = SharedMemoryMedium(None, {rank: ours for rank, (ours, _) in enumerate(pairs, start=1)}, **options)
    return sender, [SharedMemoryMedium(None, {0: theirs}, **options) for _, theirs in pairs]


def test_a_gpu_s_memory_is_freed_when_no_receiver_has_it_mapped_and_torch_is_asked_for_it(monkeypatch):
    """Freed before, torch would keep it until it is asked. Tensors of the host stand for the GPU's."""
    events = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: events.append("collected"))
    sender, receivers = ends_on_a_gpu(2)
    for name, end in zip(["freed", "let go", "let go"], [sender, *receivers], strict=True):
        end._slots[0] = torch.zeros(8, dtype=torch.uint8)
        weakref.finalize(end._slots[0], events.append, name)
    receivers[0]._peers[0].send(b"b0")  # what it gave back, which nobody has read
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(sender.close)
        for receiver in receivers:
            time.sleep(0.2)
            assert not closing.done()
            receiver.close()
        closing.result(1)
    assert [event for event in events if event != "collected"] == ["let go", "let go", "freed"]
    assert events[-1] == "collected"
    sender.close()  # again, as after an error: there is nobody to wait for


def test_a_receiver_that_does_not_let_go_of_a_gpu_s_memory_is_waited_for_two_seconds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    sender, receivers = ends_on_a_gpu(2)
    started = time.monotonic()
    sender.close()
    assert 2 <= time.monotonic() - started < 3
    assert receivers[0]._peers[0].recv(8) == b""  # it hears that nothing more comes


def test_every_receiver_of_a_gpu_s_memory_has_a_handle_of_its_own_once(monkeypatch):
    """torch counts one process for a handle: of one for all, the second to let go would make it less than none."""
    handles = iter("abc")
    monkeypatch.setattr(module, "_cuda_ipc_handle", lambda slot: [next(handles)])
    sender, receivers = ends_on_a_gpu(3)

    def allocate(index, num_bytes):
        sender._new_slots[index] = []
        return torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(sender, "_allocate", allocate)
    sender.send("{}", sender.buffer(16))
    said = [json.loads(end._peers[0].recv(1 << 10).split(b"\n")[0]) for end in receivers]
    assert [place["cuda_ipc"] for place in said] == [["a"], ["b"], ["c"]]
    sender._readers[sender._turn].clear()  # all have given it back
    sender._turn -= 1
    sender.send("{}", sender.buffer(8))
    assert "cuda_ipc" not in json.loads(receivers[0]._peers[0].recv(1 << 10).split(b"\n")[0])
