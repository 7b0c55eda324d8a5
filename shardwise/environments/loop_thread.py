"""An event loop in its own thread, concurrent with the caller."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_CLOSE_SECONDS = 2.0


class _DaemonThreads(ThreadPoolExecutor):
    """An executor with a daemon thread per call; the threads of asyncio's own executor would keep the process alive."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """See Executor.submit."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


class LoopThread:
    """An event loop in its own thread, which does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(_DaemonThreads())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Starts a coroutine; its future may be waited for or cancelled from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def comes_round(self, seconds: float) -> bool:
        """Whether the loop responds within `seconds`, so that nothing blocks it."""
        came = threading.Event()
        self.loop.call_soon_threadsafe(came.set)
        return came.wait(seconds)

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Cancels what runs and ends the loop. If a coroutine blocks the loop for longer than `seconds`, the thread
        goes on without anybody waiting for it."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(seconds)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def _run_forever(self) -> None:
        """Runs the loop until it is stopped. asyncio leaves the loop when a task raises one of the exceptions below;
        whoever waits for the task gets them too."""
        while True:
            try:
                return self.loop.run_forever()
            except (KeyboardInterrupt, SystemExit):
                continue
