"""A pool of processes that score completions: bounded in time, named in failure, whole after either."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.config import ConfigError, FunctionReward, RewardError
from shardwise.rewards.base import Answer, RewardJob
from shardwise.rewards.process import MAX_AHEAD, RewardProcess, WorkerLost, wait_for_any


class RewardPool:
    """`num_workers` processes that call reward functions; every process knows all of them. `close` leaves none behind.

    A call that hangs or dies costs its own job and process: the process is replaced, from the second time on by one
    that was started beforehand, and jobs that were waiting behind the call go to other ones. A child of user code
    that starts a session of its own is out of reach.

    Example: `for number, function, answer in pool.score(jobs): ...`
    """

    def __init__(self, functions: Sequence[FunctionReward], *, num_workers: int, timeout_seconds: float) -> None:
        """Starts the processes and returns at once; they import the functions while the caller does other things."""
        self._functions = list(functions)
        self._timeout_seconds = timeout_seconds
        self._workers: list[RewardProcess] = []
        self._spares: list[RewardProcess] = []
        self._num_spares = 0
        try:
            for _ in range(num_workers):
                self._workers.append(self._start())
        except OSError:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the processes that live now."""
        return [process.pid for process in (*self._workers, *self._spares)]

    def close(self) -> None:
        """Ends all processes. A closed pool scores no more."""
        for processes in (self._workers, self._spares):
            while processes:
                processes.pop().kill()

    def score(self, jobs: Sequence[RewardJob]) -> Iterator[tuple[int, int, Answer]]:
        """Calls every function on every job, on whichever processes are idle; (job, function, answer) as they arrive.

        Consumes: jobs. Waits for: answers. Unblocked by: an answer, the end of a process, or
        reward.timeout_seconds on each call (and a fixed deadline on the import).

        Raises:
            RewardError: a job cannot be sent. Closes the pool.
            ConfigError: a function cannot be loaded, or cannot work in this place. Closes the pool.
        """
        assert self._workers, "the pool is closed"
        try:
            yield from self._score([_arguments(job) for job in jobs])
        except BaseException:
            # Answers to what is still under way would be taken for answers to the next call.
            self.close()
            raise

    def _score(self, messages: list[str]) -> Iterator[tuple[int, int, Answer]]:
        """Calls are numbered job by job: number = job * functions + function."""
        num_functions = len(self._functions)
        num_open = len(messages) * num_functions
        pending = deque(range(num_open))
        # A process that died while it was idle must not take a job of this call with it.
        arrived = list(self._collect(pending))
        while num_open:
            self._hand_out(pending, messages)
            wait_for_any([*self._workers, *self._spares])
            for call, answer in self._collect(pending):
                arrived.append((call, answer))
            # Processes get new work before the caller gets the answers: it may take its time with them.
            self._hand_out(pending, messages)
            for call, answer in arrived:
                yield *divmod(call, num_functions), answer
            num_open -= len(arrived)
            arrived = []

    def _collect(self, pending: deque[int]) -> Iterator[tuple[int, Answer]]:
        for place, worker in enumerate(self._workers):
            try:
                for message in worker.receive():
                    call = message.pop("job")
                    yield call, Answer(**message)
            except WorkerLost as loss:
                self._workers[place] = self._replacement(worker, loss)
                if worker.jobs:
                    yield worker.jobs.popleft(), Answer(failure=str(loss))
                pending.extendleft(reversed(worker.jobs))

        self._check_spares()

    def _replacement(self, lost: RewardProcess, loss: WorkerLost) -> RewardProcess:
        if not lost.ready:
            raise ConfigError(_import_failure(self._functions, str(loss))) from None
        lost.kill()
        # Nobody pays for spares whose functions never hang.
        self._num_spares = max(1, len(self._workers) // 4)
        spare = next((spare for spare in self._spares if spare.ready), None)
        if spare is None:
            return self._start()
        self._spares.remove(spare)
        return spare

    def _check_spares(self) -> None:
        """Hears that they are ready, or gone; starts those that are missing."""
        for spare in list(self._spares):
            try:
                list(spare.receive())
            except WorkerLost as loss:
                if not spare.ready:
                    raise ConfigError(_import_failure(self._functions, str(loss))) from None
                spare.kill()
                self._spares.remove(spare)
        while len(self._spares) < self._num_spares:
            self._spares.append(self._start())

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
        return RewardProcess(self._functions, timeout_seconds=self._timeout_seconds)


def check_functions(functions: Sequence[FunctionReward]) -> None:
    """Loads reward functions in a child process, so that a bad one is found before a model is loaded.

    In a child, because importing a file runs it: it may print, exit or crash.

    Raises:
        ConfigError: as `load_function`, a parameter does not fit, or the child died or hung while importing.
    """
    process = RewardProcess(functions, timeout_seconds=0)
    try:
        while not process.ready:
            wait_for_any([process])
            list(process.receive())
    except WorkerLost as loss:
        raise ConfigError(_import_failure(functions, str(loss))) from None
    finally:
        process.kill()


def _import_failure(functions: Sequence[FunctionReward], reason: str) -> str:
    specs = ", ".join(entry.function for entry in functions)
    whose = "the function" if len(functions) == 1 else "one of the functions"
    return f"reward.functions={specs}: importing {whose} {reason}; it must import in a fresh Python process"


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
