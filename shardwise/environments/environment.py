"""Environments, which answer the policy between its turns (a game, a tool, a conversation partner), and their calls."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Protocol

from shardwise.config import EnvironmentConfig
from shardwise.environments.loop_thread import LoopThread
from shardwise.environments.timed_calls import BLOCKED, Deadline, call_in_time, deadlines_of, new_task
from shardwise.types import Example

Messages = list[dict[str, Any]]


class Environment(Protocol):
    """One episode. Every completion has its own instance; any method may be a coroutine.

    The policy's first turn answers the prompt of the row. `reset` is called before it, then `step` after every turn
    that ended by itself, `reward` at the end, and `close` always.
    """

    def reset(self, example: Example) -> None:
        """Begins the episode of a row."""

    def step(self, response: str) -> str | Messages | None:
        """Returns what the policy reads next: text (a user message, if there is a chat template), or messages. None
        ends the episode."""

    def reward(self) -> float | dict[str, float]:
        """Returns the episode's reward, also if a limit cut it off; or a dict with "score" and further numbers."""

    def close(self) -> None:
        """Releases what the instance holds."""


_LOOK_SECONDS = 0.05
"""How often the loop is checked while calls run, and how long it may take to respond before it counts as blocked."""
_GRACE_SECONDS = 2.0
"""How long a loop may stay blocked beyond a deadline before it is given up, for the sake of the other calls in it."""
_LOST = "its event loop was given up, which the coroutine of another environment had blocked beyond the deadline"


@dataclass(slots=True, eq=False)
class _Attempt:
    """One call and its outcome."""

    call: Callable[[], Any]
    deadline: Deadline | None = None
    """None until the call begins."""
    is_over: bool = False
    answer: Any = None
    """What the call returned or raised, once it is over."""

    def end(self, answer: Any) -> None:
        """Sets the outcome; only the first one counts."""
        if not self.is_over:
            self.answer, self.is_over = answer, True


class EnvironmentCaller:
    """Calls methods of many environments at a time, each within its deadline.

    Coroutines share one event loop in another thread, from the first call to `close`, so that what environments share
    (a client, a semaphore) may belong to that loop. Time in which one call blocks the loop counts only against that
    call. If one never lets go, its loop is given up with it, and the next calls share a new loop. Plain methods run in
    threads; one that outlives its deadline keeps its thread, which does not keep the process alive.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._thread = _new_thread()

    def close(self) -> None:
        """Ends the event loop."""
        self._thread.close()

    def call(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Makes the calls. Waits for: all of them. Unblocked by: their deadlines, which this thread enforces when the
        loop cannot.

        Returns:
            What each call returned, or the exception it raised; TimeoutError if it missed its deadline.
        """
        attempts = [_Attempt(call) for call in calls]
        while waiting := [attempt for attempt in attempts if not attempt.is_over]:
            self._wait(self._thread.start(self._gather(waiting, self._thread)), waiting)
        return [attempt.answer for attempt in attempts]

    async def _gather(self, attempts: Sequence[_Attempt], thread: LoopThread) -> None:
        slots = asyncio.Semaphore(self._config.max_concurrent_calls)
        await asyncio.gather(*(self._play(attempt, slots, thread) for attempt in attempts), return_exceptions=True)

    async def _play(self, attempt: _Attempt, slots: asyncio.Semaphore, thread: LoopThread) -> None:
        async with slots:
            if thread is not self._thread:  # the loop was given up while this call waited
                return
            attempt.deadline = Deadline(self._config.timeout_seconds)
            try:
                attempt.end(await call_in_time(attempt.call, attempt.deadline))
            except BaseException as error:
                attempt.end(error)

    def _wait(self, done: "futures.Future[None]", attempts: Sequence[_Attempt]) -> None:
        """Waits until the loop has made the calls, or has been blocked too long and is given up."""
        free = time.monotonic()
        while not futures.wait([done], _LOOK_SECONDS).done:
            looked = free
            while not self._thread.comes_round(_LOOK_SECONDS):
                now = time.monotonic()
                self._spare_others(now - looked)
                looked = now
                if now - free > self._config.timeout_seconds + _GRACE_SECONDS:
                    self._give_up([attempt for attempt in attempts if attempt.deadline is not None])
                    return
            free = time.monotonic()

    def _spare_others(self, seconds: float) -> None:
        """Extends the deadlines of all calls but the one that has blocked the loop for `seconds`; of none if the
        blocking task belongs to no call."""
        loop = self._thread.loop
        if holding := deadlines_of(asyncio.current_task(loop)):
            playing = {deadline for task in asyncio.all_tasks(loop) for deadline in deadlines_of(task)}
            for deadline in playing.difference(holding):
                deadline.spare(seconds)

    def _give_up(self, begun: Sequence[_Attempt]) -> None:
        """Gives up the loop and the calls that have begun in it; the others are left to the next loop."""
        holding = deadlines_of(asyncio.current_task(self._thread.loop))
        for attempt in begun:
            missed = f"no answer within {self._config.timeout_seconds:g} s: {BLOCKED}"
            attempt.end(TimeoutError(missed if attempt.deadline in holding else _LOST))
        self._thread.close(0)
        self._thread = _new_thread()


def _new_thread() -> LoopThread:
    thread = LoopThread("environments")
    thread.loop.set_task_factory(new_task)
    return thread
