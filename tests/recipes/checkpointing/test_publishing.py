import os

import pytest

from shardwise.config import ExportError
from shardwise.recipes.checkpointing.publishing import new_checkpoint, remove_leftovers


def names(run):
    return {path.relative_to(run / "checkpoints").as_posix() for path in (run / "checkpoints").rglob("*")}


def test_trap_15_nobody_sees_a_checkpoint_before_it_is_whole(tmp_path):
    with new_checkpoint(tmp_path, 3) as folder:
        (folder / "hf").mkdir()
        (folder / "hf" / "config.json").write_text("{}")
        assert names(tmp_path) == {".step_3.tmp", ".step_3.tmp/hf", ".step_3.tmp/hf/config.json"}
    assert names(tmp_path) == {"step_3", "step_3/hf", "step_3/hf/config.json"}


def test_everything_is_on_disk_before_the_name_is(tmp_path, monkeypatch):
    """Files and folders are synced, then the name is given, then the folder that holds it is synced."""
    events, fsync, replace = [], os.fsync, os.replace

    def noted_fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def noted_replace(source, target):
        events.append("renamed")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    with new_checkpoint(tmp_path, 3) as folder:
        (folder / "state" / "policy").mkdir(parents=True)
        (folder / "state" / "policy" / "index.json").write_text("{}")
    place = events.index("renamed")
    inside = {str(folder / name) for name in (".", "state", "state/policy", "state/policy/index.json")}
    assert set(events[:place]) >= {path.removesuffix("/.") for path in inside}
    assert str(tmp_path / "checkpoints") in events[place + 1 :]


def test_what_failed_leaves_nothing_and_names_the_checkpoint(tmp_path):
    def write():
        with new_checkpoint(tmp_path, 3) as folder:
            (folder / "half").write_text("x")
            raise OSError(28, "No space left on device")

    with pytest.raises(ExportError, match=r"step_3 cannot be written: \[Errno 28\] No space left on device"):
        write()
    assert names(tmp_path) == set()


def test_one_of_the_same_step_is_kept_aside(tmp_path):
    (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_3" / "old").write_text("x")
    with new_checkpoint(tmp_path, 3) as folder:
        (folder / "new").write_text("y")
    assert names(tmp_path) == {"step_3", "step_3/new", "step_3.1", "step_3.1/old"}


def test_leftovers_go_and_checkpoints_stay(tmp_path):
    for name in (".step_3.tmp/hf", "step_2/hf", ".hidden"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == {"step_2", "step_2/hf", ".hidden"}
    remove_leftovers(tmp_path / "nothing here")
