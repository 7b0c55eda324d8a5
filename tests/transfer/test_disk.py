"""What is of the disk alone: the files, and engines that start when the sender has long written."""

import json
import time
from functools import partial

import pytest
import torch
from ends import DictReceiver, DictSender, on, random_weights, run_ends, same
from safetensors.torch import load_file

from shardwise.transfer import (
    DeltaDecoder,
    DeltaEncoder,
    DiskMedium,
    WeightSyncError,
    load_version,
    pull_weights,
    push_weights,
)


def push(folder, versions, bucket_bytes, join):
    medium = join(DiskMedium, folder=folder)
    for version in versions:
        sender = DictSender(random_weights(version))
        push_weights(sender, medium, version=version, dtype=torch.bfloat16, bucket_bytes=bucket_bytes)


def pull(folder, versions, join):
    medium, receiver = join(DiskMedium, folder=folder), DictReceiver(random_weights(0))
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
    assert sorted(folder.name for folder in (tmp_path / "weights").iterdir()) == ["version-3", "version-4"]
    receiver = DictReceiver(random_weights(0))
    assert load_version(receiver, tmp_path / "weights").num_proven == len(receiver.weights)
    assert same(receiver.weights, random_weights(4))
    assert receiver.version == 4


def push_changes(folder, join):
    medium, weights, encoder = join(DiskMedium, folder=folder), random_weights(1), DeltaEncoder()
    for version in (1, 2):
        push_weights(DictSender(weights), medium, version=version, dtype=torch.bfloat16, delta=encoder)
        next(iter(weights.values())).view(-1)[0] += 1


def pull_changes(folder, join):
    medium, receiver, decoder = join(DiskMedium, folder=folder), DictReceiver(random_weights(0)), DeltaDecoder()
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


def test_f40_another_version_than_the_one_that_is_due_is_refused(tmp_path):
    write_versions(tmp_path / "weights")
    with pytest.raises(WeightSyncError, match="version 2 is due, but version 1 came"):
        load_version(DictReceiver(random_weights(0)), tmp_path / "weights", version=2)


def test_what_is_left_of_an_unfinished_version_is_removed(tmp_path):
    half = tmp_path / "weights" / "version-9"
    half.mkdir(parents=True)
    (half / "bucket-00000.safetensors").write_bytes(b"half")
    write_versions(tmp_path / "weights")
    assert [folder.name for folder in (tmp_path / "weights").iterdir()] == ["version-1"]
    marker = json.loads((tmp_path / "weights" / "version-1" / "complete.json").read_text())
    assert list(marker["xxh3"]) == ["bucket-00000.safetensors"]


def test_a_run_that_goes_on_from_an_earlier_checkpoint_replaces_later_versions(tmp_path):
    write_versions(tmp_path / "weights", versions=[9])
    write_versions(tmp_path / "weights", versions=[1, 2])
    assert sorted(folder.name for folder in (tmp_path / "weights").iterdir()) == ["version-1", "version-2"]
    receiver = DictReceiver(random_weights(0))
    assert load_version(receiver, tmp_path / "weights").version == 2


def push_twice(folder, join):
    """What the first sync failed with; the second succeeds."""
    medium = join(DiskMedium, folder=folder)
    try:
        push_weights(DictSender(random_weights(1)), medium, version=1, dtype=torch.bfloat16, bucket_bytes=4096)
    except WeightSyncError as error:
        push_weights(DictSender(random_weights(2)), medium, version=2, dtype=torch.bfloat16, bucket_bytes=4096)
        return str(error)


def pull_twice(folder, join, *, before):
    """What the first sync failed with, and whether the second brought what was sent."""
    medium, receiver = join(DiskMedium, folder=folder), DictReceiver(random_weights(0), before)
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
