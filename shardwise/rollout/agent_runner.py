"""Programs that play episodes by themselves, beside the caller."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.rollout.loop_thread import LoopThread
from shardwise.rollout.timed_calls import is_coroutine, uncancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an agent asks the policy for its turns.

    Example: `AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)`, and `model=endpoint.model`
    """

    base_url: str
    """`http://127.0.0.1:PORT/v1`."""
    api_key: str
    """Of this episode alone: what is asked with it becomes this completion."""
    model: str


class AgentRunner:
    """Runs functions until they are done: coroutines in one event loop from the first to the last, so that what they
    share (a client, a semaphore) may belong to it, other functions in a thread each."""

    def __init__(self) -> None:
        self._thread = LoopThread("agents")

    def close(self) -> None:
        """Cancels the coroutines. Threads that have not come to an end go on; they do not keep the process."""
        self._thread.close()

    def start(self, call: Callable[[], Any], done: Callable[[Any], None]) -> Callable[[], object]:
        """Runs a call beside the caller.

        Args:
            done: is called, from another thread, with what the call returned, or with the exception that it raised.
        Returns:
            What breaks it off: a coroutine is cancelled, a thread is left alone. `done` may still be called.
        """
        if is_coroutine(call):
            return self._thread.start(_await(call, done)).cancel
        threading.Thread(target=_run, args=(call, done), daemon=True).start()
        return lambda: None


async def _await(call: Callable[[], Any], done: Callable[[Any], None]) -> None:
    # In a task of its own: what it raises is the result, also where it cancels that; to be broken off is raised here.
    outcomes = await asyncio.gather(uncancelled(call()), return_exceptions=True)
    done(outcomes[0])


def _run(call: Callable[[], Any], done: Callable[[Any], None]) -> None:
    try:
        result = call()
    except BaseException as error:
        result = error
    done(result)
