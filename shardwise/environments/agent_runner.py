"""Runs agents: programs that play episodes by themselves, concurrently with the caller."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.environments.loop_thread import LoopThread
from shardwise.environments.timed_calls import is_coroutine, uncancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an agent queries the policy for its turns.

    Example: `AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)`, and `model=endpoint.model`
    """

    base_url: str
    """`http://127.0.0.1:PORT/v1`."""
    api_key: str
    """Key of this episode alone: the requests made with it become this completion."""
    model: str


class AgentRunner:
    """Runs functions until they are done: coroutines all in one event loop, so that what they share (a client, a
    semaphore) may belong to it; other functions in a thread each."""

    def __init__(self) -> None:
        self._thread = LoopThread("agents")

    def close(self) -> None:
        """Cancels the coroutines. Threads that have not finished go on, but do not keep the process alive."""
        self._thread.close()

    def start(self, call: Callable[[], Any], done: Callable[[Any], None]) -> Callable[[], object]:
        """Runs a call concurrently with the caller.

        Args:
            done: is called, from another thread, with what the call returned or the exception it raised.
        Returns:
            A function that aborts the call: a coroutine is cancelled, a thread is left alone. `done` may still be
            called.
        """
        if is_coroutine(call):
            return self._thread.start(_await(call, done)).cancel
        threading.Thread(target=_run, args=(call, done), daemon=True).start()
        return lambda: None


async def _await(call: Callable[[], Any], done: Callable[[Any], None]) -> None:
    # In a task of its own: whatever it raises is the result, even if it cancels itself; an abort is raised here.
    outcomes = await asyncio.gather(uncancelled(call()), return_exceptions=True)
    done(outcomes[0])


def _run(call: Callable[[], Any], done: Callable[[Any], None]) -> None:
    try:
        result = call()
    except BaseException as error:
        result = error
    done(result)
