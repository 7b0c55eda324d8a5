import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shardwise import scratch
from shardwise.scratch import scratch_folder

HOLDER = "import time; from shardwise.scratch import scratch_folder\nwith scratch_folder() as folder:\n"
"""The first line of a process; its body is indented."""


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Where scratch folders lie; as in a process that has made none."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    scratch._remove_abandoned.cache_clear()
    yield tmp_path
    scratch._remove_abandoned.cache_clear()


@pytest.fixture
def other():
    """A process that holds a scratch folder, with a file in it."""
    body = HOLDER + "    (folder / 'file').touch(); print(folder, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_folder_is_empty_private_and_gone_at_the_end(folders):
    with scratch_folder() as folder:
        assert folder.parent == folders
        assert list(folder.iterdir()) == []
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "deep").mkdir()
        (folder / "deep" / "file").touch()
    assert list(folders.iterdir()) == []


def test_a_folder_of_a_living_process_stays_and_one_of_a_killed_process_goes(folders, other):
    process, left = other
    with scratch_folder() as first:
        assert set(folders.iterdir()) == {left, first}
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with scratch_folder():
        assert (left / "file").exists(), "a process looks for abandoned folders once"
    scratch._remove_abandoned.cache_clear()
    with scratch_folder() as second:
        assert list(folders.iterdir()) == [second]


def test_the_children_of_a_killed_process_do_not_keep_its_folder(folders):
    """Not even one that was started while the folder was there."""
    body = HOLDER + (
        "    import os, subprocess\n"
        "    child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)\n"
        "    print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    try:
        with scratch_folder() as folder:
            assert list(folders.iterdir()) == [folder]
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)


def test_what_only_looks_like_one_stays(folders):
    """What users call by such a name, and links to their folders."""
    kept = folders / "shardwise-run"
    kept.mkdir()
    link = folders / f"{scratch._PREFIX}link"
    link.symlink_to(kept)
    with scratch_folder():
        assert kept.is_dir()
        assert link.is_symlink()
