"""A pool of processes that score completions: calls have a deadline, failures say why, and the pool survives both."""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.config import ConfigError, FunctionReward, JudgeLostError, RewardError
from shardwise.rewards.base import Answer, RewardJob
from shardwise.rewards.process import (
    MAX_AHEAD,
    MOMENT_SECONDS,
    ForkServer,
    RewardProcess,
    WorkerLost,
    wait_for_any,
)


class RewardPool:
    """A pool of `num_workers` processes, each of which can call every reward function. `close` leaves none behind.

    The functions are imported once, by a fork server, so a process starts in milliseconds. A call that hangs or dies
    costs only its own job and process: the process is replaced, and jobs that waited behind the call go to other
    processes. A child of user code that starts a session of its own is out of reach.

    Example: `for number, function, answer in pool.score(jobs): ...`
    """

    def __init__(
        self,
        functions: Sequence[FunctionReward],
        *,
        num_workers: int,
        timeout_seconds: float,
        memory_bytes: int | None = None,
    ) -> None:
        """Returns at once; the functions are imported while the caller does other things."""
        self._functions = list(functions)
        self._timeout_seconds = timeout_seconds
        self._memory_bytes = memory_bytes
        self._workers: list[RewardProcess] = []
        self._server = ForkServer(self._functions, memory_bytes=memory_bytes)
        try:
            for _ in range(num_workers):
                self._workers.append(self._start())
        except OSError:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that exist now, the fork server's first."""
        return [self._server.pid, *(worker.pid for worker in self._workers if worker.pid is not None)]

    def close(self) -> None:
        """Ends all processes. A closed pool scores no more."""
        while self._workers:
            self._workers.pop().kill()
        self._server.close()

    def score(self, jobs: Sequence[RewardJob]) -> Iterator[tuple[int, int, Answer]]:
        """Calls every function on every job, on whichever processes are idle.

        Yields (index of the job, index of the function, answer) as they arrive.

        Consumes: jobs. Waits for: answers. Unblocked by: an answer, the end of a process, or
        reward.timeout_seconds on each call (and a fixed deadline on the import).

        Raises:
            RewardError: a job cannot be sent. Closes the pool.
            ConfigError: a function cannot be loaded, or cannot work on this machine. Closes the pool.
        """
        assert self._workers, "the pool is closed"
        try:
            yield from self._score([_arguments(job) for job in jobs])
        except BaseException:
            # Answers to what is still under way would be taken for answers to the next call.
            self.close()
            raise

    def _score(self, messages: list[str]) -> Iterator[tuple[int, int, Answer]]:
        """Does the work of `score`. Calls are numbered job by job: number = job * number of functions + function."""
        num_functions = len(self._functions)
        num_open = len(messages) * num_functions
        pending = deque(range(num_open))
        # A process that died while it was idle must not be given a job, which it would lose.
        arrived = list(self._collect(pending))
        while num_open:
            self._hand_out(pending, messages)
            wait_for_any([self._server, *self._workers])
            if all(worker.has_plenty for worker in self._workers):
                time.sleep(MOMENT_SECONDS)
            for call, answer in self._collect(pending):
                arrived.append((call, answer))
            # Processes get new work before the caller gets the answers: it may take its time with them.
            self._hand_out(pending, messages)
            for call, answer in arrived:
                yield *divmod(call, num_functions), answer
            num_open -= len(arrived)
            arrived = []

    def _collect(self, pending: deque[int]) -> Iterator[tuple[int, Answer]]:
        self._server.receive()
        for place, worker in enumerate(self._workers if self._server.ready else ()):
            try:
                for message in worker.receive():
                    call = message.pop("job")
                    yield call, Answer(**message)
            except WorkerLost as loss:
                worker.kill()
                self._workers[place] = self._start()
                if worker.jobs:
                    yield worker.jobs.popleft(), Answer(failure=f"{loss}{worker.last_words()}")
                pending.extendleft(reversed(worker.jobs))

    def _hand_out(self, pending: deque[int], messages: list[str]) -> None:
        for worker in self._workers:
            pending.extendleft(reversed(worker.take_back()))
        for num_before in range(MAX_AHEAD + 1 if pending else 0):
            for worker in self._workers:
                if pending and len(worker.jobs) == num_before and worker.wants_more:
                    call = pending.popleft()
                    job, function = divmod(call, len(self._functions))
                    worker.send(call, messages[job], function=function)

    def _start(self) -> RewardProcess:
        if self._server.is_gone and self._server.ready:  # a server that never was ready cannot import the functions
            self._server.close()
            self._server = ForkServer(self._functions, memory_bytes=self._memory_bytes)
        return RewardProcess(self._server, timeout_seconds=self._timeout_seconds, memory_bytes=self._memory_bytes)


def check_functions(functions: Sequence[FunctionReward]) -> None:
    """Loads reward functions in a child process, so that a bad one is found before a model is loaded.

    In a child, because importing a file runs it: it may print, exit or crash.

    Raises:
        ConfigError: as `load_function`, a parameter does not fit, or the child died or hung while importing.
    """
    server = ForkServer(functions)
    try:
        while not server.ready:
            wait_for_any([server])
            server.receive()
    except JudgeLostError as error:  # at the very first attempt
        raise ConfigError(str(error)) from None
    finally:
        server.close()


def _arguments(job: RewardJob) -> str:
    arguments = {
        "data_source": job.data_source,
        "solution_str": job.solution_str,
        "ground_truth": job.ground_truth,
        "extra_info": job.extra_info,
    }
    try:
        return json.dumps(arguments, default=_plain)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"row {job.uid} cannot be sent to a reward function: {error}; ground_truth and extra_info may hold text, "
            "numbers, lists and dicts with text keys, so convert or drop that column"
        ) from None


def _plain(value: Any) -> Any:
    # Parquet readers hand out numpy arrays and scalars.
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no JSON form")
