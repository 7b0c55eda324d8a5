"""What is of the disk alone: the files, and engines that start when the sender has long written."""

import errno
import json
import os
import re
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ends import DictReceiver, DictSender, on, random_weights, run_ends, same
from safetensors.torch import load_file

from shardwise.config import ConfigError, ExportError
from shardwise.transfer import (
    DeltaDecoder,
    DeltaEncoder,
    DiskMedium,
    WeightSyncError,
    disk,
    load_version,
    pull_weights,
    push_weights,
    seconds_per_byte_sent,
    take_pieces,
)


def push(folder, versions, bucket_bytes, join):
    medium = join(DiskMedium, folder=folder, run="/run")
    for version in versions:
        sender = DictSender(random_weights(version))
        push_weights(sender.named_weights(torch.bfloat16), medium, version=version, bucket_bytes=bucket_bytes)


def pull(folder, versions, join):
    medium, receiver = join(DiskMedium, folder=folder, run="/run"), DictReceiver(random_weights(0))
    for version in versions:
        pull_weights(receiver, medium, version=version)


def write_versions(folder, versions=(1,), bucket_bytes=1 << 20):
    ends = [partial(push, folder, versions, bucket_bytes), partial(pull, folder, versions)]
    assert run_ends(ends, folder.parent) == [None, None]


def test_files_are_safetensors_under_the_names_of_the_weights(tmp_path):
    write_versions(tmp_path / "weights")
    files = list((tmp_path / "weights" / "version-1").glob("*.safetensors"))
    assert len(files) == 1
    assert same(load_file(files[0]), random_weights(1))


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_an_engine_that_starts_later_loads_the_newest_version_and_old_ones_are_gone(tmp_path, bucket_bytes):
    write_versions(tmp_path / "weights", versions=[1, 2, 3, 4], bucket_bytes=bucket_bytes)
    assert sorted(os.listdir(tmp_path / "weights")) == ["owner.json", "version-3", "version-4"]
    receiver = DictReceiver(random_weights(0))
    assert load_version(receiver, tmp_path / "weights").num_proven == len(receiver.weights)
    assert same(receiver.weights, random_weights(4))
    assert receiver.version == 4


def measure(folder, join):
    """What is in the folder whenever the ends meet, and when all is measured."""
    medium, names = join(DiskMedium, folder=folder, run="/run"), []
    meet = medium.meet
    medium.meet = lambda *said: (names.append(sorted(os.listdir(folder))), meet(*said))[1]
    seconds_per_byte_sent(medium)
    return [*names, sorted(os.listdir(folder))]


def be_measured(folder, join):
    take_pieces(join(DiskMedium, folder=folder, run="/run"))


def test_a_measurement_leaves_the_versions_that_are_there_and_is_none(tmp_path):
    """Of a run that goes on and dies before its first sync the versions before are all there is."""
    folder = tmp_path / "weights"
    write_versions(folder, versions=[1, 2])
    names, _ = run_ends([partial(measure, folder), partial(be_measured, folder)], tmp_path)
    versions = ["owner.json", "version-1", "version-2"]
    assert names == [versions, *4 * [["measurement", *versions]], versions]
    assert load_version(DictReceiver(random_weights(0)), folder).version == 2


def push_changes(folder, join):
    medium, weights, encoder = join(DiskMedium, folder=folder, run="/run"), random_weights(1), DeltaEncoder()
    for version in (1, 2):
        push_weights(DictSender(weights).named_weights(torch.bfloat16), medium, version=version, delta=encoder)
        next(iter(weights.values())).view(-1)[0] += 1


def pull_changes(folder, join):
    medium, receiver, decoder = (
        join(DiskMedium, folder=folder, run="/run"),
        DictReceiver(random_weights(0)),
        DeltaDecoder(),
    )
    for version in (1, 2):
        pull_weights(receiver, medium, version=version, delta=decoder)


def test_changes_alone_are_no_version_for_an_engine_that_starts_later(tmp_path):
    folder = tmp_path / "weights"
    assert run_ends([partial(push_changes, folder), partial(pull_changes, folder)], tmp_path) == [None, None]
    with pytest.raises(WeightSyncError, match="was sent as what changed since an earlier version, which this end does"):
        load_version(DictReceiver(random_weights(0)), folder)


def test_a_version_without_its_marker_does_not_exist(tmp_path):
    write_versions(tmp_path / "weights", versions=[1, 2])
    (tmp_path / "weights" / "version-2" / "complete.json").unlink()
    receiver = DictReceiver(random_weights(0))
    load_version(receiver, tmp_path / "weights")
    assert receiver.version == 1
    (tmp_path / "weights" / "version-1" / "complete.json").unlink()
    with pytest.raises(WeightSyncError, match="holds no whole version of the weights"):
        load_version(receiver, tmp_path / "weights")


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_bit, "is damaged: its xxh3 hash"),
        (cut, "is damaged: its xxh3 hash"),
        (lambda f: f.unlink(), "cannot be read"),
    ],
    ids=["one bit", "cut", "lost"],
)
def test_damaged_files_are_named_before_a_tensor_of_them_is_loaded(tmp_path, damage, message):
    write_versions(tmp_path / "weights")
    (file,) = (tmp_path / "weights" / "version-1").glob("*.safetensors")
    damage(file)
    receiver = DictReceiver(random_weights(0))
    with pytest.raises(WeightSyncError, match=f"bucket-00000.safetensors {message}"):
        load_version(receiver, tmp_path / "weights")
    assert receiver.version == 0
    assert same(receiver.weights, random_weights(0))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe\x00",
        b'{"version": 1, "xxh3": {}}',
        b'{"version": 1, "xxh3": ["bucket-00000.safetensors"]}',
        b'{"version": 1, "xxh3": {"bucket-00001.safetensors": "0"}}',
    ],
)
def test_a_marker_that_tells_no_files_is_named(tmp_path, content):
    write_versions(tmp_path / "weights")
    marker = tmp_path / "weights" / "version-1" / "complete.json"
    marker.write_bytes(content)
    with pytest.raises(
        WeightSyncError, match=f"^{marker} is damaged: .*; remove its folder, and the version before it"
    ):
        load_version(DictReceiver(random_weights(0)), tmp_path / "weights")


def test_a_marker_without_the_last_file_is_named(tmp_path):
    write_versions(tmp_path / "weights", bucket_bytes=4096)
    marker = tmp_path / "weights" / "version-1" / "complete.json"
    content = json.loads(marker.read_text())
    del content["xxh3"][max(content["xxh3"])]
    marker.write_text(json.dumps(content))
    with pytest.raises(WeightSyncError, match=f"{marker} is damaged: it does not name the version's last file"):
        load_version(DictReceiver(random_weights(0)), tmp_path / "weights")


def test_f40_another_version_than_the_one_that_is_due_is_refused(tmp_path):
    write_versions(tmp_path / "weights")
    with pytest.raises(WeightSyncError, match="version 2 is due, but version 1 came"):
        load_version(DictReceiver(random_weights(0)), tmp_path / "weights", version=2)


def test_what_is_left_of_an_unfinished_version_is_removed(tmp_path):
    write_versions(tmp_path / "weights", versions=[8, 9])
    (tmp_path / "weights" / "version-8" / "complete.json").unlink()
    (tmp_path / "weights" / "version-9" / "complete.json").unlink()
    write_versions(tmp_path / "weights")
    assert sorted(os.listdir(tmp_path / "weights")) == ["owner.json", "version-1"]
    marker = json.loads((tmp_path / "weights" / "version-1" / "complete.json").read_text())
    assert list(marker["xxh3"]) == ["bucket-00000.safetensors"]


def test_a_run_that_goes_on_from_an_earlier_checkpoint_replaces_later_versions(tmp_path):
    write_versions(tmp_path / "weights", versions=[9])
    write_versions(tmp_path / "weights", versions=[1, 2])
    assert sorted(os.listdir(tmp_path / "weights")) == ["owner.json", "version-1", "version-2"]
    receiver = DictReceiver(random_weights(0))
    assert load_version(receiver, tmp_path / "weights").version == 2


def push_twice(folder, join):
    """What the first sync failed with; the second succeeds."""
    medium = join(DiskMedium, folder=folder, run="/run")
    try:
        push_weights(DictSender(random_weights(1)).named_weights(torch.bfloat16), medium, version=1, bucket_bytes=4096)
    except WeightSyncError as error:
        push_weights(DictSender(random_weights(2)).named_weights(torch.bfloat16), medium, version=2, bucket_bytes=4096)
        return str(error)


def pull_twice(folder, join, *, before):
    """What the first sync failed with, and whether the second brought what was sent."""
    medium, receiver = join(DiskMedium, folder=folder, run="/run"), DictReceiver(random_weights(0), before)
    try:
        pull_weights(receiver, medium, version=1)
    except WeightSyncError as error:
        pull_weights(receiver, medium, version=2)
        return str(error), same(receiver.weights, random_weights(2))


def damage_once_read(folder, read):
    """Damages the second bucket when the other receiver has read all of them."""
    while not read.exists():
        time.sleep(0.01)
    flip_a_bit(folder / "version-1" / "bucket-00001.safetensors")


def test_a_file_that_one_receiver_finds_damaged_fails_the_sync_at_every_end_and_not_the_medium(tmp_path):
    folder, read = tmp_path / "weights", tmp_path / "read"
    damage = on("embed", partial(damage_once_read, folder, read))
    ends = [push_twice, partial(pull_twice, before=damage), partial(pull_twice, before=on("counts", read.touch))]
    at_sender, (at_finder, finder_is_whole), (at_other, other_is_whole) = run_ends(
        [partial(end, folder) for end in ends], tmp_path
    )
    assert "bucket-00001.safetensors is damaged" in at_finder
    assert at_sender == at_other == f"weight sync 1 failed at receiver 1: {at_finder}"
    assert finder_is_whole
    assert other_is_whole


LARGE = {"embed": torch.arange(1 << 18, dtype=torch.int32), "norm": torch.ones(8, dtype=torch.int32)}
LARGE_BEFORE = {name: torch.zeros_like(tensor) for name, tensor in LARGE.items()}


@contextmanager
def no_room_in_a_file():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def no_room_for(name):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, name, refuse)
        yield


def push_without_room(folder, room, join):
    """What the first sync failed with; the second, with more room, succeeds."""
    medium = join(DiskMedium, folder=folder, run="/run")
    sender = DictSender(LARGE)
    with pytest.raises(ExportError) as refused, room():
        push_weights(sender.named_weights(torch.bfloat16), medium, version=1)
    push_weights(sender.named_weights(torch.bfloat16), medium, version=2)
    return str(refused.value)


def pull_without_room(folder, join):
    """What the first sync failed with, and whether the second brought what was sent."""
    medium, receiver = join(DiskMedium, folder=folder, run="/run"), DictReceiver(LARGE_BEFORE)
    with pytest.raises(ExportError) as refused:
        pull_weights(receiver, medium, version=1)
    pull_weights(receiver, medium, version=2)
    return str(refused.value), same(receiver.weights, LARGE)


@pytest.mark.parametrize(
    ("room", "says"),
    [
        (no_room_in_a_file, "File too large"),
        (partial(no_room_for, "fsync_path"), "No space left on device"),
        (partial(no_room_for, "write_json_atomic"), "No space left on device"),
    ],
)
def test_a_disk_that_is_full_is_told_at_every_end_as_the_user_s_to_mend_and_fails_not_the_medium(tmp_path, room, says):
    folder = tmp_path / "weights"
    ends = [partial(push_without_room, folder, room), *2 * [partial(pull_without_room, folder)]]
    at_sender, *at_receivers = run_ends(ends, tmp_path)
    assert re.fullmatch(
        rf"rollout\.placement\.folder={folder} cannot be written to \(.*{says}.*\); free space there, or give a folder "
        "that rank 0 may write to",
        at_sender,
    )
    assert at_receivers == [(at_sender, True)] * 2


def join_in_threads(folder, run="/run", num_ends=2):
    """The media, or what each end raised."""
    store = dist.HashStore()
    options = {"folder": folder, "run": run, "timeout": timedelta(seconds=5)}
    with ThreadPoolExecutor(num_ends) as threads:
        ends = [threads.submit(DiskMedium.join, store, rank, num_ends, **options) for rank in range(num_ends)]
    return [end.exception() or end.result() for end in ends]


def refusal(folder, run="/run"):
    """What both ends were told."""
    at_sender, at_receiver = join_in_threads(folder, run)
    assert isinstance(at_sender, ConfigError), at_sender
    assert isinstance(at_receiver, ConfigError), at_receiver
    assert str(at_sender) == str(at_receiver)
    assert str(at_sender).startswith(f"rollout.placement.folder={folder} ")
    return str(at_sender)


@pytest.mark.parametrize("name", ["version-notes", "version-2", "version-2.txt", "version-02", "models"])
def test_a_folder_that_holds_what_is_no_run_s_is_refused_and_left_as_it_is(tmp_path, name):
    file = tmp_path / name if name.endswith(".txt") else tmp_path / name / "important.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text("important")
    assert f"holds {name}, which is not a run's; give an empty folder" in refusal(tmp_path)
    assert file.read_text() == "important"
    assert os.listdir(tmp_path) == [name]


def test_a_folder_that_is_not_the_same_for_all_ends_is_refused_at_each(tmp_path):
    """As on hosts with file systems of their own, where the path is the same."""
    store, folders = dist.HashStore(), [tmp_path / "one", tmp_path / "other", tmp_path / "one"]
    with ThreadPoolExecutor(3) as threads:
        options = {"run": "/run", "timeout": timedelta(seconds=30)}
        began = time.monotonic()
        ends = [threads.submit(DiskMedium.join, store, n, 3, folder=folders[n], **options) for n in range(3)]
    assert time.monotonic() - began < 10
    for folder, end in zip(folders, ends, strict=True):
        assert isinstance(end.exception(), ConfigError)
        assert str(end.exception()) == (
            f"rollout.placement.folder={folder}: what the sender writes there is not seen by receiver 1 on "
            f"{socket.gethostname()}; give a folder on a file system that all hosts share"
        )
    assert os.listdir(tmp_path / "one") == ["owner.json"]


@pytest.mark.parametrize("name", ["version-notes", "version-9.txt", "version-09"])
def test_what_comes_into_a_run_s_folder_later_is_no_version_and_stays(tmp_path, name):
    folder = tmp_path / "weights"
    receiver = DictReceiver(random_weights(0))
    sender, medium = join_in_threads(folder)
    other = folder / name
    if other.suffix:
        other.write_text("important")
    else:
        other.mkdir()
        (other / "complete.json").write_text("{}")
    for version in (1, 2, 3):
        with ThreadPoolExecutor(1) as thread:
            weights = DictSender(random_weights(version)).named_weights(torch.bfloat16)
            pushing = thread.submit(push_weights, weights, sender, version=version)
            pull_weights(receiver, medium)
            pushing.result()
    assert sorted(os.listdir(folder)) == sorted(["owner.json", "version-2", "version-3", name])
    assert load_version(receiver, folder).version == 3
    assert f"holds {name}, which is not a run's" in refusal(folder)


def test_a_second_run_is_refused_the_folder_of_the_first_which_may_come_again(tmp_path):
    folder = tmp_path / "weights"
    write_versions(folder)
    (folder / ".nfs0001").touch()  # of the file system
    said = refusal(folder, "/other")
    assert "is that of the run /run, and this run is /other; give each run a folder of its own" in said
    assert load_version(DictReceiver(random_weights(0)), folder).version == 1
    write_versions(folder, versions=[2])
    assert sorted(os.listdir(folder)) == [".nfs0001", "owner.json", "version-1", "version-2"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '"run"'])
def test_an_owner_that_cannot_be_read_is_not_this_run(tmp_path, content):
    (tmp_path / "owner.json").write_text(content)
    assert f"{tmp_path / 'owner.json'} does not say whose; give another folder" in refusal(tmp_path)


def test_a_folder_that_cannot_be_made_or_written_to_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for folder in (Path("/proc/weights"), tmp_path / "file" / "weights"):
        said = refusal(folder)
        assert re.search(r"cannot be written to \(\[Errno .*\); give a folder that rank 0 may write to", said)
    with monkeypatch.context() as patch:

        def refuse(**_):
            raise PermissionError(13, "Permission denied")

        patch.setattr("tempfile.TemporaryFile", refuse)  # those who test may be root
        assert "cannot be written to ([Errno 13] Permission denied)" in refusal(tmp_path / "read-only")


def test_an_end_that_refuses_a_folder_says_so_though_the_others_do_not_come():
    with pytest.raises(ConfigError, match=r"rollout\.placement\.folder=/proc/weights cannot be written to"):
        DiskMedium.join(
            dist.HashStore(), 0, 2, folder=Path("/proc/weights"), run="/run", timeout=timedelta(seconds=0.1)
        )
