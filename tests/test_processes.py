import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardwise.processes import LastLines, end_group, how_it_ended, mapped_files

ROOT = Path(__file__).parents[1]
CHILD = """
import os, sys, time
sys.path.insert(0, {root!r})
from shardwise.processes import die_with, end_group_with, start_resource_tracker
{bind}
print("bound", flush=True)
while True:
    time.sleep(1)
"""
SECONDS = 20


def child(bind: str, **options) -> subprocess.Popen:
    code = CHILD.format(root=str(ROOT), bind=bind)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True, **options)
    assert process.stdout.readline() == b"bound\n"
    return process


def test_a_stopped_process_ends_with_the_thread_that_started_it():
    started, is_over = [], threading.Event()

    def start():
        started.append(child(f"die_with({os.getpid()})"))
        is_over.wait()

    thread = threading.Thread(target=start)
    thread.start()
    while not started:
        time.sleep(0.01)
    os.kill(started[0].pid, signal.SIGSTOP)
    is_over.set()
    assert started[0].wait(SECONDS) == -signal.SIGKILL


def test_a_process_whose_parent_is_gone_already_ends_at_once():
    code = CHILD.format(root=str(ROOT), bind="die_with(1 << 22)")
    assert subprocess.run([sys.executable, "-c", code], timeout=SECONDS, stdout=subprocess.PIPE).returncode == 1


def test_a_process_and_what_it_started_end_with_the_other_end_of_a_pipe():
    """The grandchild writes to the child's standard output, which ends with the last of both."""
    reader, writer = os.pipe()
    process = child(f"end_group_with({reader})\nos.fork() or time.sleep(1000)", pass_fds=[reader])
    os.close(writer)
    assert process.wait(SECONDS) == -signal.SIGIO
    assert process.stdout.read() == b""  # to the end: the grandchild too is gone


TRACKED = """
from multiprocessing.shared_memory import SharedMemory
start_resource_tracker()
end_group_with({reader})
memory = SharedMemory({name!r}, create=True, size=4096)
"""


def test_a_process_that_ends_with_the_other_end_of_a_pipe_leaves_no_shared_memory():
    reader, writer = os.pipe()
    memory = Path("/dev/shm", f"shardwise-test-{os.getpid()}")
    process = child(TRACKED.format(reader=reader, name=memory.name), pass_fds=[reader])
    assert memory.is_file()
    os.close(writer)
    assert process.wait(SECONDS) == -signal.SIGIO
    process.stdout.close()
    deadline = time.monotonic() + SECONDS
    while memory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended its process with exit code 0"),
        (3, "ended its process with exit code 3"),
        (-11, "ended its process by SIGSEGV"),
        (-9, "ended its process by SIGKILL (out of memory?)"),
        (-40, "ended its process by signal 40"),
    ],
)
def test_an_exit_code_in_words(code, words):
    assert how_it_ended(code) == words


SHARING = """
import subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(memory.name, flush=True)
time.sleep(600)
"""


def test_a_group_that_is_ended_leaves_no_shared_memory():
    command = [sys.executable, "-c", SHARING]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    memory = Path("/dev/shm", process.stdout.readline().strip())
    assert memory.is_file()
    started = time.monotonic()
    end_group(process.pid)
    assert process.wait(SECONDS) == -signal.SIGKILL
    assert time.monotonic() - started < SECONDS
    assert not memory.exists()
    end_group(process.pid)  # nobody is left
    process.stdout.close()


def test_a_group_with_a_process_that_is_stopped_is_ended():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    process.send_signal(signal.SIGSTOP)
    end_group(process.pid)
    assert process.wait(SECONDS) == -signal.SIGKILL


def test_the_last_lines_are_those_that_a_terminal_shows():
    lines = LastLines()
    assert str(lines) == ""
    assert lines.add(b"10 %\r50 %\r100 %\n") == "100 %"
    assert lines.add(b"\n") == ""
    for number in range(4):
        lines.add(b"%d: \xff%s\n" % (number, b"x" * 300))
    assert str(lines) == "; it last printed: " + " | ".join(["100 %", *(f"{n}: \ufffd{'x' * 196}" for n in range(4))])


def test_mapped_files_are_those_of_the_whole_group_that_still_have_a_name(tmp_path):
    """The child has one mapped whose name is gone, and its child one more than it."""
    for name in "abg":
        (tmp_path / name).write_text("x")
    mapped = "import numpy; m = [numpy.memmap(name) for name in {names!r}]"
    first, second = (mapped.format(names=[str(tmp_path / name) for name in names]) for names in ("ag", "b"))
    process = child(f"{first}; os.unlink({str(tmp_path / 'g')!r})\nif os.fork() == 0: {second}; time.sleep(1000)")
    deadline = time.monotonic() + SECONDS
    while not any(file.name == "b" for file in mapped_files(process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    found = mapped_files(process.pid)
    end_group(process.pid)
    process.wait()
    assert {file for file in found if file.is_relative_to(tmp_path)} == {tmp_path / "a", tmp_path / "b"}
    assert mapped_files(process.pid) == set()
