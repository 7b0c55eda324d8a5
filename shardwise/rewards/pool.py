"""A pool of processes that score completions: bounded in time, named in failure, whole after either."""

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

from shardwise.config import ConfigError, RewardConfig, RewardError
from shardwise.rewards.base import RewardJob, RewardResult
from shardwise.rewards.process import RewardProcess, WorkerLost, wait_for_any

SHORT_SECONDS = 0.05
"""A process whose last job was shorter gets the next one while it works on this one: for short jobs the way back and
forth would cost as much as the call."""


class RewardPool:
    """`num_workers` processes that call `reward.function`. A context manager; `close` leaves no process behind.

    A call that hangs or dies costs its own job and process: the process is replaced, and a job that was waiting behind
    the call goes to another one. A child of user code that starts a session of its own is out of reach.

    Example:
        with RewardPool(RewardConfig(function="rules.py:compute_score")) as pool:
            results = pool.score([RewardJob(uid="a.jsonl:7", data_source="sums", solution_str="5", ground_truth="5")])
    """

    def __init__(self, config: RewardConfig) -> None:
        """Starts the processes and returns at once; they import the function while the caller does other things."""
        self._config = config
        self._workers: list[RewardProcess] = []
        try:
            for _ in range(config.num_workers):
                self._workers.append(self._start())
        except OSError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes. A closed pool scores no more."""
        while self._workers:
            self._workers.pop().kill()

    def score(self, jobs: Sequence[RewardJob]) -> list[RewardResult]:
        """Scores the jobs on whichever processes are idle.

        Consumes: jobs. Waits for: answers. Unblocked by: an answer, the end of a process, or
        reward.timeout_seconds on each call (and a fixed deadline on the import).

        Returns:
            One result per job, in the order of the jobs.
        Raises:
            RewardError: a call failed and reward.on_failure is abort, or a job cannot be sent. Closes the pool.
            ConfigError: the function cannot be loaded. Closes the pool.
        """
        assert self._workers, "the pool is closed"
        try:
            messages = [_arguments(job) for job in jobs]
            return self._score(jobs, messages)
        except BaseException:
            # Answers to what is still under way would be taken for answers to the next call.
            self.close()
            raise

    def _score(self, jobs: Sequence[RewardJob], messages: list[str]) -> list[RewardResult]:
        results: dict[int, RewardResult] = {}
        pending = deque(range(len(jobs)))
        # A process that died while it was idle must not take a job of this call with it.
        self._collect(jobs, results, pending)
        while len(results) < len(jobs):
            self._hand_out(pending, messages)
            wait_for_any(self._workers)
            self._collect(jobs, results, pending)
        return [results[number] for number in range(len(jobs))]

    def _collect(self, jobs: Sequence[RewardJob], results: dict[int, RewardResult], pending: deque[int]) -> None:
        for place, worker in enumerate(self._workers):
            try:
                for answer in worker.receive():
                    results[answer["job"]] = self._result(jobs[answer["job"]], answer)
            except WorkerLost as loss:
                if not worker.ready:
                    raise ConfigError(_import_failure(self._config.function, str(loss))) from None
                worker.kill()
                self._workers[place] = self._start()
                if worker.jobs:
                    failed = worker.jobs.popleft()
                    results[failed] = self._result(jobs[failed], {"failure": str(loss)})
                pending.extendleft(reversed(worker.jobs))

    def _hand_out(self, pending: deque[int], messages: list[str]) -> None:
        for num_before in (0, 1):
            for worker in self._workers:
                wants_more = num_before == 0 or worker.last_seconds < SHORT_SECONDS
                if pending and worker.ready and len(worker.jobs) == num_before and wants_more:
                    number = pending.popleft()
                    worker.send(number, messages[number])

    def _result(self, job: RewardJob, answer: dict[str, Any]) -> RewardResult:
        config = self._config
        if "failure" not in answer:
            return RewardResult(score=answer["score"], parts=answer["parts"])
        if config.on_failure == "abort":
            raise RewardError(
                f"reward function {config.function} failed for row {job.uid}: {answer['failure']}. Fix the function, "
                f"or set reward.on_failure=value to score such rows reward.failure_value={config.failure_value:g}"
            )
        return RewardResult(score=config.failure_value, failure=answer["failure"])

    def _start(self) -> RewardProcess:
        return RewardProcess(self._config.function, timeout_seconds=self._config.timeout_seconds)


def check_function(spec: str) -> None:
    """Loads a reward function in a child process, so that a bad one is found before a model is loaded.

    In a child, because importing the file runs it: it may print, exit or crash.

    Raises:
        ConfigError: as `load_function`, or the child died or hung while importing.
    """
    process = RewardProcess(spec, timeout_seconds=0)
    try:
        while not process.ready:
            wait_for_any([process])
            list(process.receive())
    except WorkerLost as loss:
        raise ConfigError(_import_failure(spec, str(loss))) from None
    finally:
        process.kill()


def _import_failure(spec: str, reason: str) -> str:
    if reason.startswith("reward.function="):
        return reason
    return f"reward.function={spec}: importing the function {reason}; it must import in a fresh Python process"


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
