"""Calls of many environments: each answered, failed or late on its own account."""

import asyncio
import threading
import time
from contextlib import closing
from functools import partial

import pytest

from shardwise.config import CustomEnvironment
from shardwise.environments import EnvironmentCaller


def caller(**options):
    return closing(EnvironmentCaller(CustomEnvironment(path="a.py:B", **options)))


async def doubled(number):
    await asyncio.sleep(0.01 * (3 - number))
    return 2 * number


def test_answers_come_in_the_order_of_the_calls_from_threads_and_coroutines():
    with caller() as environments:
        calls = [partial(doubled, 1), partial(divmod, 7, 2), partial(doubled, 2), lambda: "x"]
        assert environments.call(calls) == [2, (3, 1), 4, "x"]
        assert environments.call([]) == []


@pytest.mark.filterwarnings("error")
def test_a_plain_function_may_return_a_coroutine_whose_deadline_is_its_own():
    with caller(timeout_seconds=0.5) as environments:
        answered, late = environments.call([lambda: doubled(4), lambda: asyncio.sleep(60)])
    assert answered == 8
    assert str(late) == "no answer within 0.5 s"


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration("over"), SystemExit(3), KeyError("k")])
def test_what_a_call_raises_is_its_answer_alone(error):
    def fails():
        raise error

    async def fails_later():
        raise error

    with caller() as environments:
        first, second, third = environments.call([fails, lambda: 5, fails_later])
    assert second == 5
    for raised in (first, third):
        assert isinstance(raised, BaseException)
        assert str(error) in str(raised) or "StopIteration" in str(raised)


@pytest.mark.alone
def test_a_call_that_hangs_costs_its_deadline_and_nobody_elses_answer():
    release = threading.Event()

    async def hangs():
        await asyncio.sleep(60)

    began = time.perf_counter()
    with caller(timeout_seconds=0.3, max_concurrent_calls=1) as environments:
        answers = environments.call([release.wait, hangs, lambda: 1])
    assert time.perf_counter() - began < 3  # the thread that hangs is not waited for
    release.set()
    assert [type(answer) for answer in answers] == [TimeoutError, TimeoutError, int]
    assert str(answers[0]) == "no answer within 0.3 s"


@pytest.mark.alone
def test_a_coroutine_that_blocks_misses_its_own_deadline_and_nobody_elses():
    async def quick():
        await asyncio.sleep(0.01)
        return "quick"

    async def blocks():
        time.sleep(0.9)
        return "late"

    with caller(timeout_seconds=0.3) as environments:
        first, late, last = environments.call([quick, blocks, quick])
        (alone,) = environments.call([blocks])
    assert (first, last) == ("quick", "quick")
    assert type(late) is type(alone) is TimeoutError
    assert str(alone).startswith("no answer within 0.3 s: it blocked the event loop; await what takes long")


@pytest.mark.alone
def test_time_in_which_others_hold_the_loop_does_not_count():
    async def holds():
        time.sleep(0.2)
        return 1

    async def waits():
        for _ in range(2):
            await asyncio.sleep(0.1)
        return 2

    with caller(timeout_seconds=0.5) as environments:
        assert environments.call([waits, *[holds] * 5]) == [2, *[1] * 5]


@pytest.mark.alone
def test_a_tool_that_blocks_in_its_task_is_known_by_its_call():
    async def slow():
        time.sleep(0.9)

    async def blocks():
        await asyncio.gather(slow())

    async def waits():
        await asyncio.sleep(0.02)
        return 2

    with caller(timeout_seconds=0.3) as environments:
        late, answer = environments.call([blocks, waits])
    assert (type(late), answer) == (TimeoutError, 2)


@pytest.mark.alone
def test_a_coroutine_that_never_lets_go_costs_its_deadline_and_its_loop():
    release = threading.Event()

    async def first():
        return 1

    async def hangs():
        release.wait(60)
        return "never read"

    async def waits():
        await asyncio.sleep(0.05)

    async def loop():
        return asyncio.get_running_loop()

    began = time.perf_counter()
    with caller(timeout_seconds=0.3, max_concurrent_calls=3) as environments:
        (before,) = environments.call([loop])
        answers = environments.call([first, waits, hangs, loop])
        assert time.perf_counter() - began < 10
        release.set()
        assert answers[0] == 1
        assert type(answers[1]) is type(answers[2]) is TimeoutError
        assert "event loop was given up, which the coroutine of another environment had blocked" in str(answers[1])
        assert "no answer within 0.3 s: it blocked the event loop" in str(answers[2])
        assert environments.call([loop]) == [answers[3]]
    assert answers[3] is not before  # who had not begun is played on the next loop


def test_what_cancels_itself_or_interrupts_fails_alone():
    async def cancelled():
        raise asyncio.CancelledError

    async def cancels_its_task():
        asyncio.current_task().cancel()
        await asyncio.sleep(1)

    async def interrupts():
        raise KeyboardInterrupt

    def interrupts_its_thread():
        raise KeyboardInterrupt

    with caller() as environments:
        calls = [cancelled, lambda: cancelled(), cancels_its_task, interrupts, interrupts_its_thread, lambda: 5]
        *failed, answer = environments.call(calls)
    assert answer == 5
    assert [repr(error) for error in failed] == [
        *["RuntimeError('the call was cancelled from inside')"] * 2,
        "CancelledError()",
        *["KeyboardInterrupt()"] * 2,
    ]


def test_a_timeout_of_the_environments_own_is_told_as_its_own():
    def gives_up():
        raise TimeoutError("the tool is away")

    with caller() as environments:
        (answer,) = environments.call([gives_up])
    assert str(answer) == "the tool is away"


def test_no_more_calls_run_at_a_time_than_are_allowed():
    running, most = [], []

    def work(number):
        running.append(number)
        most.append(len(running))
        time.sleep(0.01)
        running.remove(number)

    with caller(max_concurrent_calls=3) as environments:
        environments.call([partial(work, number) for number in range(12)])
    assert 1 < max(most) <= 3


def test_coroutines_of_one_batch_share_an_event_loop():
    async def loop():
        return id(asyncio.get_running_loop())

    with caller() as environments:
        first, second = environments.call([loop]), environments.call([loop])
    assert first == second
