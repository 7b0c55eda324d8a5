"""A deadline in an event loop: who misses it, and whose time it is."""

import asyncio
import time

import pytest

from shardwise.environments.timed_calls import Deadline, call_in_time, deadlines_of, new_task


async def naps(seconds):
    await asyncio.sleep(seconds)
    return seconds


def test_time_that_is_spared_is_there_after_the_deadline():
    async def both():
        spared, other = Deadline(0.2), Deadline(0.2)
        spared.spare(30)
        calls = [call_in_time(lambda: naps(0.4), deadline) for deadline in (spared, other)]
        return await asyncio.gather(*calls, return_exceptions=True)

    answered, late = asyncio.run(both())
    assert answered == 0.4
    assert (type(late), str(late)) == (TimeoutError, "no answer within 0.2 s")


def test_an_answer_that_blocked_the_loop_beyond_the_deadline_is_late():
    async def blocks():
        time.sleep(0.2)

    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s: it blocked the event loop; await"):
        asyncio.run(call_in_time(blocks, Deadline(0.1)))


def test_tasks_of_a_call_are_within_its_deadline():
    outer, inner = Deadline(9), Deadline(8)

    async def within():
        return deadlines_of(asyncio.current_task())

    async def begins():
        return await asyncio.gather(within(), call_in_time(within, inner))

    async def all_of_it():
        asyncio.get_running_loop().set_task_factory(new_task)
        found = await call_in_time(begins, outer)
        return [*found, await within()]

    assert asyncio.run(all_of_it()) == [(outer,), (outer, inner), ()]


def test_a_cancellation_from_outside_stays_one():
    async def cancelled():
        task = asyncio.create_task(call_in_time(lambda: naps(60), Deadline(60)))
        await asyncio.sleep(0.1)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
