"""An event loop beside the caller ends what runs in it, and waits for nothing that does not end."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from shardwise.environments.loop_thread import LoopThread


async def where():
    return threading.current_thread()


def test_coroutines_run_in_a_thread_of_their_own():
    thread = LoopThread("beside")
    first, second = thread.start(where()).result(5), thread.start(where()).result(5)
    thread.close()
    assert first is second
    assert (first.name, first.daemon, first.is_alive()) == ("beside", True, False)


def test_closing_cancels_what_runs():
    thread, ended = LoopThread("beside"), []

    async def hangs():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    thread.start(hangs())
    thread.start(where()).result(5)
    thread.close()
    assert ended == [True]
    assert thread.loop.is_closed()


def test_closing_does_not_wait_for_what_holds_the_loop():
    thread, release = LoopThread("beside"), threading.Event()

    async def holds():
        release.wait(60)

    thread.start(holds())
    began = time.monotonic()
    thread.close()
    assert time.monotonic() - began < 10
    release.set()


def test_a_loop_that_is_held_does_not_come_round():
    thread, holds, release = LoopThread("beside"), threading.Event(), threading.Event()

    async def hold():
        holds.set()
        release.wait(60)

    assert thread.comes_round(20)
    thread.start(hold())
    assert holds.wait(20)
    assert not thread.comes_round(0.1)
    release.set()
    assert thread.comes_round(20)
    thread.close()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_task_that_would_end_the_program_ends_itself_alone(error):
    thread = LoopThread("beside")

    async def fails():
        raise error

    async def waits():
        return await asyncio.gather(asyncio.create_task(fails()), return_exceptions=True)

    assert [type(told) for told in thread.start(waits()).result(20)] == [error]
    assert thread.start(where()).result(20).name == "beside"
    thread.close()


def test_what_a_coroutine_gave_to_a_thread_does_not_keep_the_process():
    program = """
import asyncio, time
from shardwise.environments.loop_thread import LoopThread

thread = LoopThread("beside")
future = thread.start(asyncio.to_thread(time.sleep, 600))
assert thread.start(asyncio.to_thread(lambda: 7)).result(20) == 7
thread.close()
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def test_what_a_thread_raises_its_coroutine_raises():
    thread = LoopThread("beside")
    with pytest.raises(ZeroDivisionError):
        thread.start(asyncio.to_thread(lambda: 1 / 0)).result(20)
    thread.close()
