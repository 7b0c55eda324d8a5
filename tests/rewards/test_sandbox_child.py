"""Pieces of the sandbox's inner side; what it keeps programs from is in test_sandbox.py."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.rewards import sandbox_child
from shardwise.rewards.sandbox_child import limit_resources, readable_paths


def in_child(function):
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_it_is_a_script_of_the_standard_library_alone():
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit('pydantic' in sys.modules)"
    path = str(Path(sandbox_child.__file__))
    assert subprocess.run([sys.executable, "-I", "-S", "-c", code, path], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("prefix", "added"), [("/usr", []), ("/usr/local", []), ("/usrlocal", ["/usrlocal"]), ("/opt/py", ["/opt/py"])]
)
def test_readable_paths_hold_python_once(monkeypatch, prefix, added):
    monkeypatch.setattr(sys, "base_prefix", prefix)
    assert readable_paths() == [*sandbox_child.SYSTEM_FOLDERS, *added]


def test_limits_are_set_and_a_lower_ceiling_is_kept():
    def check():
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        settings = {"cpu_seconds": 3, "memory_bytes": 1 << 33, "disk_bytes": 1 << 20, "num_open_files": 64}
        limit_resources({**settings, "num_processes": 8}, count_processes=False)
        assert resource.getrlimit(resource.RLIMIT_CPU) == (3, 4)
        assert resource.getrlimit(resource.RLIMIT_AS) == (1 << 33, 1 << 33)
        assert resource.getrlimit(resource.RLIMIT_FSIZE) == (1 << 20, 1 << 20)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (32, 32)
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
        assert resource.getrlimit(resource.RLIMIT_NPROC)[0] != 8

    assert in_child(check) == 0


def test_landlock_confines_writing_to_a_folder(tmp_path):
    if sandbox_child.landlock_version() < 1:
        pytest.skip("this kernel has no Landlock")

    def check():
        sandbox_child.restrict_files(str(tmp_path / "mine"))
        (tmp_path / "mine" / "file").write_text("x")
        for action in (
            lambda: (tmp_path / "theirs").write_text("x"),
            lambda: (tmp_path / "theirs").unlink(),
            lambda: (tmp_path / "theirs").read_text(),
            lambda: os.rename(tmp_path / "theirs", tmp_path / "mine" / "theirs"),
        ):
            with pytest.raises(OSError):  # noqa: PT011
                action()

    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs").write_text("theirs")
    assert in_child(check) == 0
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert (tmp_path / "mine" / "file").read_text() == "x"
