import json
import os

import pytest

from shardwise.durable import fsync_folder, fsync_path, is_still_at, replacing, write_json_atomic


@pytest.fixture
def synced(monkeypatch):
    """Paths that the operating system was asked to write, in order."""
    paths = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: paths.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    return paths


def test_the_names_in_a_folder_are_made_durable_after_the_files(tmp_path, synced):
    for name in "ab":
        (tmp_path / name).write_text(name)
    fsync_folder(tmp_path)
    assert sorted(synced[:-1]) == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert synced[-1] == str(tmp_path)


def test_a_failure_to_write_is_raised_and_leaves_no_open_file(tmp_path, monkeypatch):
    def fails(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Input/output error"):
        fsync_path(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_was_moved_removed_or_replaced_is_not_where_it_was_opened(tmp_path):
    path = tmp_path / "log"
    with path.open("w") as file:
        assert is_still_at(file, path)
        path.rename(tmp_path / "moved")
        assert not is_still_at(file, path)
        path.write_text("another")
        assert not is_still_at(file, path)
        (tmp_path / "moved").replace(path)
        assert is_still_at(file, path)
        path.unlink()
        assert not is_still_at(file, path)


def test_a_file_takes_the_place_of_another_when_it_is_whole_and_on_the_disk(tmp_path, synced):
    path = tmp_path / "latest"
    path.write_text("old")
    (tmp_path / ".latest.tmp").write_text("what a killed process has left")
    with replacing(path) as file:
        file.write("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert synced == [str(tmp_path / ".latest.tmp")]
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(str(1 / 0))
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["latest"]


def test_write_json_atomic_replaces_the_whole_file_or_nothing(tmp_path):
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"val/accuracy": 0.5, "bad": float("inf")})
    assert path.read_text() == '{\n  "val/accuracy": 0.5,\n  "bad": null\n}\n'
    with pytest.raises(TypeError):
        write_json_atomic(path, {"a": object()})
    assert json.loads(path.read_text()) == {"val/accuracy": 0.5, "bad": None}
    assert os.listdir(tmp_path) == ["summary.json"]
