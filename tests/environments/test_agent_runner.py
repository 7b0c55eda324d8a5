"""Agents are run beside the caller, told of once, and broken off where they can be."""

import asyncio
import queue
import threading
import time
from contextlib import closing

import pytest

from shardwise.environments import AgentRunner


@pytest.fixture
def runner():
    with closing(AgentRunner()) as runner:
        yield runner


def run(runner, call):
    results = queue.Queue()
    cancel = runner.start(call, results.put)
    return results, cancel


async def doubled():
    await asyncio.sleep(0)
    return 4


def raises():
    raise ValueError("no")


async def raises_later():
    raise SystemExit(3)


async def cancels_itself():
    raise asyncio.CancelledError


async def cancels_its_task():
    asyncio.current_task().cancel()
    await asyncio.sleep(5)


class Unusual(BaseException):
    pass


async def raises_something_unusual():
    raise Unusual


def interrupts():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (cancels_itself, "RuntimeError('the call was cancelled from inside')"),
        (cancels_its_task, "CancelledError('')"),
        (raises_something_unusual, "Unusual()"),
        (interrupts, "KeyboardInterrupt()"),
    ],
)
def test_what_an_agent_lets_out_is_its_own_failure(runner, call, told):
    assert repr(run(runner, call)[0].get(timeout=5)) == told


def test_functions_and_coroutines_are_told_of(runner):
    assert run(runner, doubled)[0].get(timeout=5) == 4
    assert run(runner, lambda: 5)[0].get(timeout=5) == 5
    assert isinstance(run(runner, raises)[0].get(timeout=5), ValueError)
    assert isinstance(run(runner, raises_later)[0].get(timeout=5), SystemExit)
    assert run(runner, doubled)[0].get(timeout=5) == 4  # the loop has outlived it


@pytest.mark.alone
def test_the_caller_does_not_wait(runner):
    release = threading.Event()
    began = time.monotonic()
    results, cancel = run(runner, lambda: release.wait(5))
    assert time.monotonic() - began < 1
    cancel()  # threads are left alone
    release.set()
    assert results.get(timeout=5) is True


def test_a_coroutine_that_is_cancelled_is_ended_and_not_told_of(runner):
    ended, began = threading.Event(), threading.Event()

    async def hangs():
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    results, cancel = run(runner, hangs)
    assert began.wait(5)
    cancel()
    assert ended.wait(5)
    assert results.empty()
