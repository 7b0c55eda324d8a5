"""An event loop beside the caller ends what runs in it, and waits for nothing that does not end."""

import asyncio
import threading
import time

from shardwise.rollout.loop_thread import LoopThread


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
