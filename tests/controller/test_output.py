"""Output that ends before the job does."""

import os
import pty
import subprocess
import sys

import pytest

from shardwise.controller.output import lasting_output

JOB = """
import sys
from shardwise.controller.output import lasting_output
with lasting_output():
    sys.stdin.readline()
    for number in range(3):
        print("step", number, flush=True)
        print("more")
        sys.stdout.writelines(["a", "b"])
    print(f"{sys.stdout.isatty()} {sys.stdout.encoding}", file=sys.stderr)
"""
DROPPED = "warning: standard output cannot be written to ({}); continues without it\n"


def run_job(stdout, before=lambda: None, **options) -> tuple[int, str]:
    """Its exit code and what it says on standard error. `before` is called before it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", JOB], stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE, text=True, **options
    )
    before()
    _, err = process.communicate("go\n", timeout=60)
    return process.returncode, err


def test_a_full_disk_is_told_once_and_the_job_goes_on():
    with open("/dev/full", "w") as full:
        assert run_job(full) == (0, DROPPED.format("No space left on device") + "False utf-8\n")


def test_so_does_it_where_nobody_reads_the_pipe_any_more():
    reader, writer = os.pipe()
    try:
        code, err = run_job(writer, lambda: os.close(reader))
    finally:
        os.close(writer)
    assert (code, err) == (0, DROPPED.format("Broken pipe") + "False utf-8\n")


def test_so_does_it_where_the_terminal_has_closed():
    master, slave = pty.openpty()
    code, err = run_job(slave, lambda: (os.close(slave), os.close(master)))
    assert (code, err) == (0, DROPPED.format("Input/output error") + "False utf-8\n")


def test_so_does_it_where_both_ended_together():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        whole = [sys.executable, "-c", JOB]
        done = subprocess.run(whole, input="go\n", text=True, stdout=writer, stderr=writer, timeout=60, check=False)
    finally:
        os.close(writer)
    assert done.returncode == 0


@pytest.mark.parametrize("closed", [(1,), (1, 2)])
def test_so_does_it_where_they_were_closed_before(closed):
    code, err = run_job(subprocess.PIPE, preexec_fn=lambda: [os.close(number) for number in closed])
    assert (code, err) == (0, "False utf-8\n" if closed == (1,) else "")


def test_what_is_printed_arrives_in_order_and_streams_are_given_back(capsys):
    before = sys.stdout, sys.stderr
    with lasting_output():
        print("a", flush=True)
        sys.stdout.writelines(["b\n", "c\n"])
        print("d", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    assert tuple(capsys.readouterr()) == ("a\nb\nc\n", "d\n")
