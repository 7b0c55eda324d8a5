"""Calls of many environments: each answered, failed or late on its own account."""

import asyncio
import threading
import time
from contextlib import closing
from functools import partial

import pytest

from shardwise.config import CustomEnvironment
from shardwise.rollout import EnvironmentCaller


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
