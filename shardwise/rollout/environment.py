"""What answers the policy between its turns: a game, a tool, a conversation partner. And how its methods are called."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Protocol

from shardwise.config import EnvironmentConfig
from shardwise.rollout.loop_thread import LoopThread
from shardwise.rollout.timed_calls import BLOCKED, Deadline, call_in_time, deadlines_of, new_task
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


_LOOK_SECONDS = 0.05
"""How often a loop is looked at while calls run, and how long it may take to come round before it counts as held."""
_GRACE_SECONDS = 2.0
"""A loop that is held beyond a deadline has so long to come back, for the sake of the other calls in it."""
_LOST = "its event loop was given up, which the coroutine of another environment had blocked beyond the deadline"


@dataclass(slots=True, eq=False)
class _Attempt:
    """A call, from its turn on."""

    call: Callable[[], Any]
    deadline: Deadline | None = None
    """None before its turn."""
    is_over: bool = False
    answer: Any = None
    """What came of it, once it is over."""

    def end(self, answer: Any) -> None:
        """Of several ends the first one counts."""
        if not self.is_over:
            self.answer, self.is_over = answer, True


class EnvironmentCaller:
    """Calls methods of many environments at a time, each within its deadline.

    Coroutines share one event loop, beside the caller, from the first call to `close`, so that what environments share
    (a client, a semaphore) may belong to it. Time in which one of them holds the loop is its own and nobody else's; one
    that does not let go of it takes it along, and the next calls share another loop. Other methods run in threads; one
    that outlives its deadline keeps its thread, which does not keep the process.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._thread = _new_thread()

    def close(self) -> None:
        """Ends the event loop."""
        self._thread.close()

    def call(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Consumes: calls. Waits for: all of them. Unblocked by: their deadlines, which this thread keeps where the
        loop cannot.

        Returns:
            What each call returned, or the exception that it raised; TimeoutError where it missed its deadline.
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
            if thread is not self._thread:  # given up while this one waited
                return
            attempt.deadline = Deadline(self._config.timeout_seconds)
            try:
                attempt.end(await call_in_time(attempt.call, attempt.deadline))
            except BaseException as error:
                attempt.end(error)

    def _wait(self, done: "futures.Future[None]", attempts: Sequence[_Attempt]) -> None:
        """Until the loop has played them, or has been held too long and is given up."""
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
        """So long one call has held the loop. Where it is no call's task that holds it, nobody is spared."""
        loop = self._thread.loop
        if holding := deadlines_of(asyncio.current_task(loop)):
            playing = {deadline for task in asyncio.all_tasks(loop) for deadline in deadlines_of(task)}
            for deadline in playing.difference(holding):
                deadline.spare(seconds)

    def _give_up(self, begun: Sequence[_Attempt]) -> None:
        """The loop, with what plays in it; those that have not begun are for the next one."""
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
