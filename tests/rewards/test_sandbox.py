"""F45: programs that try to do harm, and the harm that is not there afterwards.

Every test lets the same program do its work outside the sandbox too, or shows otherwise that the effect would be seen.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from shardwise.config import ConfigError
from shardwise.rewards import sandbox
from shardwise.rewards.sandbox import Limits, run_python


def missing_protections():
    """What this machine lacks for programs to be run in a sandbox; empty where nothing does."""
    try:
        run_python("", limits=Limits())
    except ConfigError as error:
        return str(error)
    return ""


LACKING = missing_protections()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"no sandbox here: {LACKING}")


def run(program, *, stdin="", **limits):
    return run_python(program, stdin=stdin, limits=Limits(**{"wall_seconds": 30, **limits}))


def processes_with(word):
    """Of this machine, all namespaces: those whose command line holds `word`."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and word in (folder / "cmdline").read_text(errors="replace"):
                found.append(int(folder.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def wait_until_none(word, *, seconds=5):
    """The kernel takes a moment to end what was killed."""
    deadline = time.monotonic() + seconds
    while processes_with(word):
        assert time.monotonic() < deadline, processes_with(word)
        time.sleep(0.02)


@pytest.fixture
def victim():
    """A file that anybody may write, in a folder that anybody may write."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        file = Path(folder) / "precious.txt"
        file.write_text("precious")
        file.chmod(0o666)
        yield file


def test_a_harmless_program_runs_with_the_standard_library_and_a_folder_of_its_own():
    outcome = run(
        "import asyncio, decimal, json, math, multiprocessing, random, sqlite3, subprocess, sys, threading\n"
        "open('note', 'w').write(sys.stdin.read() + ' é')\n"
        "print(open('note').read(), __name__, flush=True)\n"
        "print('oops', file=sys.stderr)\n"
        "subprocess.run([sys.executable, '-S', '-c', 'print(6 * 7)'])\n"
        "exit(3)\n",
        stdin="given ü",
    )
    assert (outcome.exit_code, outcome.stopped, outcome.stdout, outcome.stderr) == (
        3, None, "given ü é __main__\n42\n", "oops\n"
    )  # fmt: skip
    assert not list(Path(tempfile.gettempdir()).glob("shardwise-*/note"))


def test_f45_fork_bomb_is_bounded_and_leaves_nothing():
    word = f"bomb{os.getpid()}"
    outcome = run(
        f"import os, subprocess, sys, time\n"
        f"made = 0\n"
        f"while True:\n"
        f"    try:\n"
        f"        command = [sys.executable, '-S', '-c', 'import time; time.sleep(1000)', '{word}']\n"
        f"        subprocess.Popen(command, start_new_session=True)\n"
        f"        made += 1\n"
        f"    except OSError as error:\n"
        f"        print(made, type(error).__name__, flush=True)\n"
        f"        break\n",
        num_processes=12,
    )  # fmt: skip
    made, kind = outcome.stdout.split()
    assert 5 <= int(made) <= 12
    assert kind == "BlockingIOError"
    wait_until_none(word)


def test_f45_a_program_that_forks_for_ever_ends_at_its_deadline():
    began = time.monotonic()
    outcome = run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n", wall_seconds=2)
    assert outcome.stopped == "time"
    assert time.monotonic() - began < 20


def test_f45_ten_gigabytes_are_refused():
    outcome = run("data = bytearray(10 * 2**30)", memory_bytes=256 << 20)
    assert outcome.exit_code == 1
    assert "MemoryError" in outcome.stderr
    assert run("data = bytearray(100 * 2**20); print(len(data))", memory_bytes=256 << 20).exit_code == 0


def test_f45_files_outside_can_be_neither_deleted_nor_written_nor_read(victim):
    program = (
        "import os\n"
        f"path = {str(victim)!r}\n"
        "for action in (\n"
        "    lambda: os.remove(path),\n"
        "    lambda: open(path, 'w').write('x'),\n"
        "    lambda: print(open(path).read()),\n"
        "    lambda: open(path + '.new', 'w'),\n"
        "    lambda: os.rename(os.path.dirname(path), '/tmp/gone'),\n"
        "    lambda: open('/etc/passwd').read(),\n"
        "    lambda: open('/usr/lib/x', 'w'),\n"
        "    lambda: open('/x', 'w'),\n"
        "):\n"
        "    try:\n"
        "        action()\n"
        "    except OSError as error:\n"
        "        print(type(error).__name__)\n"
        "    else:\n"
        "        print('DONE')\n"
    )
    outcome = run(program)
    assert len(outcome.stdout.splitlines()) == 8
    assert "DONE" not in outcome.stdout
    assert "precious" not in outcome.stdout
    assert victim.read_text() == "precious"
    assert [path.name for path in victim.parent.iterdir()] == ["precious.txt"]


def test_f45_there_is_no_network():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()
        program = (
            "import socket\n"
            "def udp():\n"
            f"    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', {address!r})\n"
            f"for action in (lambda: socket.create_connection({address!r}, timeout=5), udp):\n"
            "    try:\n"
            "        action()\n"
            "    except OSError as error:\n"
            "        print('refused')\n"
            "    else:\n"
            "        print('DONE')\n"
        )
        outside = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert outside.stdout.split() == ["DONE", "DONE"]
        listener.accept()[0].close()
        assert run(program).stdout.split() == ["refused", "refused"]
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_f45_no_process_outside_can_be_seen_or_killed():
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        if os.geteuid() == 0:
            # The sandbox's own user may kill it but for the sandbox.
            bystander.kill()
            bystander.wait()
            bystander = subprocess.Popen(["sleep", "1000"], user=65534, group=65534)
        outcome = run(
            "import os, signal\n"
            f"for pid in ({bystander.pid}, {os.getpid()}, -1):\n"
            "    try:\n"
            "        os.kill(pid, signal.SIGKILL)\n"
            "        print('sent')\n"
            "    except OSError as error:\n"
            "        print(type(error).__name__)\n"
            "try:\n"
            "    os.kill(os.getppid(), signal.SIGKILL)\n"
            "except OSError: pass\n"
            "print('alive', os.getpid() < 10, os.path.exists('/proc/1'), flush=True)\n"
        )
        assert "alive True False" in outcome.stdout
        assert outcome.stdout.split()[:2] == ["ProcessLookupError", "ProcessLookupError"]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_f45_secrets_of_the_environment_are_not_there(monkeypatch):
    monkeypatch.setenv("API_KEY", "hunter2-secret")
    outcome = run(
        "import os, glob\n"
        "print(sorted(os.environ))\n"
        "for path in glob.glob('/proc/*/environ'):\n"
        "    try: print(open(path, 'rb').read())\n"
        "    except OSError: pass\n"
        "print('end')\n"
    )
    assert outcome.stdout.splitlines() == ["['HOME', 'LANG', 'PATH', 'TMPDIR']", "end"]


def test_f45_endless_output_ends_the_program_and_is_cut():
    outcome = run("while True: print('x' * 10_000)", output_bytes=100_000)
    assert (outcome.stopped, outcome.exit_code, len(outcome.stdout)) == ("output", None, 100_000)


def test_f45_a_program_that_never_ends_and_one_that_sleeps_are_ended():
    word = f"sleeper{os.getpid()}"
    command = f"[sys.executable, '-S', '-c', 'import time; time.sleep(99)', '{word}']"
    outcome = run(f"import subprocess, sys\nsubprocess.run({command})", wall_seconds=2)
    assert outcome.stopped == "time"
    wait_until_none(word)
    assert run("while True: pass", cpu_seconds=1).exit_code == -24


def test_f45_the_disk_is_bounded():
    outcome = run(
        "n = 0\n"
        "try:\n"
        "    while n < 1000:\n"
        "        open(str(n), 'wb').write(b'x' * 2**20)\n"
        "        n += 1\n"
        "except OSError as error:\n"
        "    print(n, error.strerror)\n",
        disk_bytes=8 << 20,
    )
    count, reason = outcome.stdout.split(" ", 1)
    assert int(count) <= 8
    assert reason == "No space left on device\n"


def test_f45_privileges_cannot_be_won_back():
    outcome = run(
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(os.getuid() != 0, libc.unshare(0x10000000), libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None))\n"
        "try: os.setuid(0)\n"
        "except OSError: print('refused')\n"
        "try: os.chroot('/tmp')\n"
        "except OSError: print('refused')\n"
    )
    assert outcome.stdout == "True -1 -1\nrefused\nrefused\n"


def test_f45_without_a_sandbox_it_refuses_and_says_what_is_missing(monkeypatch, tmp_path):
    """A child that finds no Landlock and may not unshare, as in a container."""
    source = Path(sandbox.__file__).with_name("sandbox_child.py").read_text()
    assert "def landlock_version() -> int:\n" in source
    source = source.replace("def landlock_version() -> int:\n", "def landlock_version() -> int:\n    return -1\n", 1)
    source = source.replace("_check(_libc.unshare(_NAMESPACES))", "raise PermissionError(1, 'Operation not permitted')")
    child = tmp_path / "sandbox_child.py"
    child.write_text(source)
    monkeypatch.setattr(sandbox, "_CHILD", child)
    with pytest.raises(ConfigError) as caught:
        run("print(1)")
    assert "lacks: user, process, network and mount namespaces (Operation not permitted); " in str(caught.value)
    assert "; Landlock (Linux 5.13 or newer" in str(caught.value)
    assert "set the parameter allow_unsafe: true" in str(caught.value)


def test_f45_allow_unsafe_runs_with_what_there_is(monkeypatch, tmp_path):
    source = Path(sandbox.__file__).with_name("sandbox_child.py").read_text()
    source = source.replace("_check(_libc.unshare(_NAMESPACES))", "raise PermissionError(1, 'Operation not permitted')")
    child = tmp_path / "sandbox_child.py"
    child.write_text(source)
    monkeypatch.setattr(sandbox, "_CHILD", child)
    assert run_python("print(1)", limits=Limits(), allow_unsafe=True).stdout == "1\n"


def test_the_folder_of_a_caller_that_is_killed_goes_at_the_next_start(tmp_path):
    """Also where the caller is root, and the program's files are not."""
    code = (
        "import os\n"
        "from shardwise.rewards import sandbox\n"
        "sandbox._read_until_end = lambda *_: os.kill(os.getpid(), 9)\n"
        "sandbox.run_python('', limits=sandbox.Limits())\n"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], cwd=root, env=environment).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    code = "from shardwise.scratch import scratch_folder\nwith scratch_folder() as folder: print(folder)\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert Path(done.stdout.strip()).name != left.name
    assert list(tmp_path.iterdir()) == []


def test_of_a_caller_that_died_before_it_began_no_program_runs(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(RuntimeError, match="the sandbox ended without an answer"):
        run_python("print(1)", limits=Limits(), allow_unsafe=True)


def test_the_death_of_the_caller_ends_the_program():
    word = f"orphan{os.getpid()}"
    code = (
        "from shardwise.rewards.sandbox import Limits, run_python\n"
        "command = \"[sys.executable, '-S', '-c', 'import time; time.sleep(99)', '"
        f"{word}']\"\n"
        "program = f'import subprocess, sys; subprocess.run({command})'\n"
        "run_python(program, limits=Limits(wall_seconds=99))\n"
    )
    root = Path(__file__).resolve().parents[2]
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=root)
    deadline = time.monotonic() + 40
    while len(processes_with(word)) < 1 or (caller.pid in processes_with(word) and len(processes_with(word)) < 2):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    caller.kill()
    caller.wait()
    while processes_with(word):
        assert time.monotonic() < deadline
        time.sleep(0.05)
