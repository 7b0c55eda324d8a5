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
"""What a call may raise beside the main thread, where signals go: all of it is the call's own failure."""


class Deadline:
    """Of one call, from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds

    @property
    def left_seconds(self) -> float:
        """Below 0 where it has passed."""
        return self._until - time.monotonic()

    def spare(self, seconds: float) -> None:
        """Moves it: so long the call could not run, for another one held the event loop."""
        self._until += seconds


_DEADLINES: WeakKeyDictionary[asyncio.Future[Any], tuple[Deadline, ...]] = WeakKeyDictionary()
"""What every task is called within, the outermost first."""


def deadlines_of(task: asyncio.Future[Any] | None) -> tuple[Deadline, ...]:
    """Those of the calls that the task works for; of None there are none."""
    return () if task is None else _DEADLINES.get(task, ())


def new_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """A task factory: tasks that a call begins work for that call."""
    task = asyncio.Task(work, loop=loop, **options)
    _DEADLINES[task] = deadlines_of(asyncio.current_task(loop))
    return task


async def call_in_time(call: Callable[[], Any], deadline: Deadline) -> Any:
    """What a coroutine function returns, or another one, which runs in a thread of its own; where that returns a
    coroutine, what comes of it.

    Raises:
        TimeoutError: it took longer. A thread is not waited for any more, and goes on.
        RuntimeError: it was cancelled, though not by its caller.
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
    """What comes of it.

    Raises:
        RuntimeError: it was cancelled, and nobody has cancelled the task that waits for it.
    """
    try:
        return await awaitable
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("the call was cancelled from inside") from None


def is_coroutine(call: Callable[[], Any]) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(call.func if isinstance(call, partial) else call)


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Unlike asyncio.to_thread's, this thread is waited for by nobody once its deadline has passed."""
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
