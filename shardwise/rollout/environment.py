"""What answers the policy between its turns: a game, a tool, a conversation partner. And how its methods are called."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from shardwise.config import EnvironmentConfig
from shardwise.types import Example

Messages = list[dict[str, Any]]


class Environment(Protocol):
    """One episode. Every completion has an instance of its own; any method may be a coroutine.

    The policy's first turn answers the prompt of the row. `reset` is called before it, then `step` after every turn
    that ended by itself, `reward` at the end, and `close` always.
    """

    def reset(self, example: Example) -> None:
        """Begins the episode of a row."""

    def step(self, response: str) -> str | Messages | None:
        """What the policy reads next: text (a message of the user's, where there is a chat template), or messages. None
        ends the episode."""

    def reward(self) -> float | dict[str, float]:
        """What the episode has earned, also one that a limit cut off; or a dict with "score" and further numbers."""

    def close(self) -> None:
        """Releases what the instance holds."""


class EnvironmentCaller:
    """Calls methods of many environments at a time, each within its deadline.

    Coroutines share one event loop from the first call to `close`, so that what environments share (a client, a
    semaphore) may belong to it. Other methods run in threads; one that outlives its deadline keeps its thread, which
    does not keep the process.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._runner = asyncio.Runner()

    def close(self) -> None:
        """Ends the event loop."""
        self._runner.close()

    def call(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Consumes: calls. Waits for: all of them. Unblocked by: their deadlines.

        Returns:
            What each call returned, or the exception that it raised; TimeoutError where it missed its deadline.
        """
        return self._runner.run(self._gather(calls))

    async def _gather(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        slots = asyncio.Semaphore(self._config.max_concurrent_calls)
        return await asyncio.gather(*(self._attempt(call, slots) for call in calls))

    async def _attempt(self, call: Callable[[], Any], slots: asyncio.Semaphore) -> Any:
        async with slots:
            try:
                return await call_in_time(call, self._config.timeout_seconds)
            except (Exception, SystemExit) as error:
                return error


async def call_in_time(call: Callable[[], Any], seconds: float) -> Any:
    """What a coroutine function returns, or another one, which runs in a thread of its own; where that returns a
    coroutine, what comes of it.

    Raises:
        TimeoutError: it took longer. A thread is not waited for any more, and goes on.
    """
    try:
        async with asyncio.timeout(seconds) as deadline:
            returned = await (call() if is_coroutine(call) else _in_thread(call))
            return await returned if inspect.iscoroutine(returned) else returned
    except TimeoutError:
        if deadline.expired():
            raise TimeoutError(f"no answer within {seconds:g} s") from None
        raise


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
        except (Exception, SystemExit) as error:
            delivered = None, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, *delivered)

    threading.Thread(target=work, daemon=True).start()
    value, error = await outcome
    if error is not None:
        raise error
    return value
