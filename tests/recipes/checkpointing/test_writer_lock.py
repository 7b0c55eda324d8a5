"""The lock of a run's folder, with real processes."""

import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardwise.config import ConfigError
from shardwise.recipes.checkpointing.writer_lock import LOCK, require_no_writer, writer_lock

ROOT = Path(__file__).parents[3]
HOLDER = """
import sys, time
from pathlib import Path
from shardwise.recipes.checkpointing.writer_lock import writer_lock
with writer_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def take(folder):
    with writer_lock(folder):
        return True


def test_f23_a_second_writer_is_told_who_the_first_one_is(holder, tmp_path):
    with pytest.raises(ConfigError) as error:
        take(tmp_path)
    assert re.fullmatch(
        rf"trainer.output_dir={tmp_path} is written to by process {holder.pid} on {socket.gethostname()}, since "
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00; wait until it is done or end it, or give this run another "
        r"trainer.output_dir",
        str(error.value),
    )
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK).read_text()  # what it said of itself is still there
    assert take(tmp_path)


def test_f23_a_first_look_tells_the_same_and_takes_nothing(holder, tmp_path):
    with pytest.raises(ConfigError) as decided:
        take(tmp_path)
    with pytest.raises(ConfigError) as looked:
        require_no_writer(tmp_path)
    assert str(looked.value) == str(decided.value)
    holder.kill()
    holder.wait()
    require_no_writer(tmp_path)
    assert take(tmp_path)
    require_no_writer(tmp_path / "nothing")


def test_the_key_is_named_that_gave_the_folder(holder, tmp_path):
    for refused in (
        lambda: require_no_writer(tmp_path, key="eval.output_dir"),
        lambda: writer_lock(tmp_path, key="eval.output_dir").__enter__(),
    ):
        with pytest.raises(ConfigError, match=r"^eval\.output_dir=.* or give this run another eval\.output_dir$"):
            refused()


def test_the_file_is_there_while_the_lock_is_held(tmp_path):
    for _ in range(2):
        with writer_lock(tmp_path / "run"):
            assert f'"pid": {os.getpid()}' in (tmp_path / "run" / LOCK).read_text()
            with pytest.raises(ConfigError, match=f"process {os.getpid()} on "):
                take(tmp_path / "run")
        assert not (tmp_path / "run" / LOCK).exists()


def test_a_file_that_its_holder_removed_is_no_lock(tmp_path, monkeypatch):
    """Between opening and locking, the first writer ends: what was opened has no name any more."""
    flock, opened = fcntl.flock, []

    def slow_flock(file, how):
        if not opened:
            (tmp_path / LOCK).unlink()
        opened.append(os.fstat(file.fileno()).st_ino)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", slow_flock)
    with writer_lock(tmp_path):
        assert len(opened) == 2
        assert (tmp_path / LOCK).stat().st_ino == opened[1]


def test_a_lock_that_somebody_removed_is_made_again(tmp_path, capsys):
    with writer_lock(tmp_path) as lock:
        lock.require()
        assert capsys.readouterr().err == ""
        (tmp_path / LOCK).unlink()
        lock.require()
        assert f"{tmp_path / LOCK} was removed while this run writes there" in capsys.readouterr().err
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on "):
            take(tmp_path)
        lock.require()
        assert capsys.readouterr().err == ""
    assert not (tmp_path / LOCK).exists()


def test_a_lock_that_was_removed_and_that_another_process_took_is_not_this_one_s_any_more(tmp_path):
    held = writer_lock(tmp_path)
    lock = held.__enter__()
    (tmp_path / LOCK).unlink()
    with writer_lock(tmp_path):
        with pytest.raises(ConfigError, match=f"is written to by process {os.getpid()} on "):
            lock.require()
        held.__exit__(None, None, None)
        assert (tmp_path / LOCK).exists(), "the other's"


def test_a_folder_that_is_gone_is_told_as_such(tmp_path):
    with writer_lock(tmp_path / "run") as lock:
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(ConfigError, match=rf"^trainer\.output_dir={tmp_path}/run was removed or moved while this "):
            lock.require()


def test_whoever_only_looks_keeps_no_writer_out(tmp_path):
    (tmp_path / LOCK).touch()
    with (tmp_path / LOCK).open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        done = threading.Timer(0.05, looking.close)
        done.start()
        assert take(tmp_path)
        done.join()


def test_where_a_file_system_has_no_locks_the_run_goes_on_with_a_warning(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert take(tmp_path)
    assert "has no locks" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer.output_dir=.*/file/run cannot be written to: .*; give a folder"):
        take(tmp_path / "file" / "run")


def test_a_link_to_a_folder_that_is_not_there_is_named(tmp_path):
    (tmp_path / "run").symlink_to("other disk/run")
    with pytest.raises(ConfigError, match=r"trainer.output_dir=.*/run is a link to other disk/run, which is not there"):
        take(tmp_path / "run")
