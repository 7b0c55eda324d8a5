"""File systems that fail around a save: the checkpoint that is there stays, and the policy decides the rest."""

import os
import shutil

import pytest

from shardwise.config import ExportError, TrainerConfig
from shardwise.recipes.checkpointing import publishing, retention, save_checks


def test_a_folder_that_cannot_be_synced_after_the_rename_leaves_the_checkpoint_published(tmp_path, monkeypatch, capsys):
    def fails(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(publishing, "fsync_path", fails)
    with publishing.new_checkpoint(tmp_path, 2) as folder:
        (folder / "a").write_text("a")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2"]
    assert "step_2 is saved" in capsys.readouterr().err


def test_a_latest_that_cannot_be_written_does_not_keep_older_checkpoints(tmp_path, monkeypatch, capsys):
    def fails(run, step):
        raise OSError(28, "No space left on device")

    pruned = []
    monkeypatch.setattr(retention, "write_latest", fails)
    monkeypatch.setattr(retention, "remove_old", lambda run, trainer: pruned.append(run))
    retention.after_saving(tmp_path, 2, TrainerConfig.model_construct(keep_best=None), retention.Reported())
    assert pruned == [tmp_path]
    assert "were not removed" not in capsys.readouterr().err


def test_a_file_system_that_does_not_tell_its_free_bytes_fails_the_save_and_not_the_run(tmp_path, monkeypatch):
    def fails(path):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(shutil, "disk_usage", fails)
    with pytest.raises(ExportError, match="Stale file handle"):
        save_checks.check_before_saving(tmp_path, [], TrainerConfig.model_construct(save_state=False), None)


def test_leftovers_of_a_bundle_are_removed(tmp_path):
    os.makedirs(tmp_path / "nonfinite" / ".bundle.tmp" / "part")
    publishing.remove_leftovers(tmp_path)
    assert list((tmp_path / "nonfinite").iterdir()) == []
