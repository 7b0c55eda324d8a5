"""Calls of user code, each within its deadline."""

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

BLOCKED = (
    "it blocked the event loop; await what takes long, or make it a plain function, which runs in a thread of its own"
)


USER_ERRORS = (Exception, SystemExit, KeyboardInterrupt, BaseExceptionGroup)
"""Exceptions that count as a call's own failure: signals go to the main thread, and calls run outside it."""


class Deadline:
    """The deadline of one call, which starts now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds

    @property
    def left_seconds(self) -> float:
        """Time left; negative once the deadline has passed."""
        return self._until - time.monotonic()

    def spare(self, seconds: float) -> None:
        """Extends the deadline by time in which the call could not run because another one blocked the event loop."""
        self._until += seconds


_DEADLINES: WeakKeyDictionary[asyncio.Future[Any], tuple[Deadline, ...]] = WeakKeyDictionary()
"""The deadlines that every task runs under, the outermost first."""


def deadlines_of(task: asyncio.Future[Any] | None) -> tuple[Deadline, ...]:
    """Returns the deadlines of the calls that the task works for; none for None."""
    return () if task is None else _DEADLINES.get(task, ())


def new_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """A task factory: tasks that a call starts work for that call, under its deadlines."""
    task = asyncio.Task(work, loop=loop, **options)
    _DEADLINES[task] = deadlines_of(asyncio.current_task(loop))
    return task


async def call_in_time(call: Callable[[], Any], deadline: Deadline) -> Any:
    """Calls a function within its deadline and returns its result. A coroutine function is awaited here; a plain
    function runs in its own thread, and if it returns a coroutine, that is awaited here.

    Raises:
        TimeoutError: the call took too long. Its thread, if any, goes on, but is no longer waited for.
        RuntimeError: the call was cancelled, but not by its caller.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    outer = deadlines_of(task)
    _DEADLINES[task] = *outer, deadline
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        if deadline.left_seconds <= 0:
            timeout.reschedule(loop.time())
        else:
            timer = loop.call_later(deadline.left_seconds, look)

    timer = loop.call_later(deadline.left_seconds, look)
    missed = f"no answer within {deadline.seconds:g} s"
    try:
        async with asyncio.timeout(None) as timeout:
            returned = await uncancelled(call() if is_coroutine(call) else _in_thread(call))
            returned = await uncancelled(returned) if inspect.iscoroutine(returned) else returned
    except TimeoutError:
        if timeout.expired():
            raise TimeoutError(missed) from None
        raise
    finally:
        timer.cancel()
        _DEADLINES[task] = outer
    if deadline.left_seconds <= 0:
        raise TimeoutError(f"{missed}: {BLOCKED}")
    return returned


async def uncancelled(awaitable: Awaitable[Any]) -> Any:
    """Awaits and returns the result.

    Raises:
        RuntimeError: the awaitable was cancelled, although nobody has cancelled the task that waits for it.
    """
    try:
        return await awaitable
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("the call was cancelled from inside") from None


def is_coroutine(call: Callable[[], Any]) -> bool:
    """Whether the call is of a coroutine function."""
    return inspect.iscoroutinefunction(call.func if isinstance(call, partial) else call)


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Runs a call in a daemon thread. Unlike asyncio.to_thread's, nobody waits for it after its deadline."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((value, error))

    def work() -> None:
        delivered: tuple[Any, BaseException | None]
        try:
            delivered = call(), None
        except BaseException as error:
            delivered = None, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, *delivered)

    threading.Thread(target=work, daemon=True).start()
    value, error = await outcome
    if error is not None:
        raise error
    return value
