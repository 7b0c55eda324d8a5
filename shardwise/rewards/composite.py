"""The reward of a completion: the weighted sum of what functions and judges say, under one policy for failures."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any, Self

from shardwise.config import (
    ConfigError,
    EnvironmentReward,
    FunctionReward,
    JudgeLostError,
    JudgeReward,
    ModelReward,
    RewardConfig,
    RewardError,
)
from shardwise.console import listed, warn
from shardwise.rewards.base import Answer, RewardJob, RewardResult, Scorer
from shardwise.rewards.judge import Judge
from shardwise.rewards.parts import combine
from shardwise.rewards.pool import RewardPool, check_functions
from shardwise.rewards.scores import finite_number, finite_numbers
from shardwise.rewards.user_code import describe_error, load_function

_FIX_IT = "Fix it"


class Rewards:
    """Scores completions with all of reward.functions. A context manager; `close` leaves no process behind.

    Example:
        with Rewards(RewardConfig(functions="rules.py:compute_score")) as rewards:
            results = rewards.score([RewardJob(uid="a.jsonl:7", data_source="", solution_str="5", ground_truth="5")])
    """

    def __init__(self, config: RewardConfig, models: Mapping[str, Scorer] | None = None) -> None:
        """Starts the processes and returns at once.

        Args:
            models: entry name -> scorer, for the entries of type model.
        Raises:
            ConfigError: a judge's key is not in the environment.
        """
        self._config = config
        self._models = models or {}
        functions = [entry for entry in config.functions if isinstance(entry, FunctionReward)]
        self._names = [entry.name for entry in functions]
        self._entries = {entry.name: entry for entry in config.functions}
        self._failures = FailurePolicy(config)
        self._judges = [Judge(entry) for entry in config.functions if isinstance(entry, JudgeReward)]
        self._pool = (
            RewardPool(
                functions,
                num_workers=config.num_workers,
                timeout_seconds=config.timeout_seconds,
                memory_bytes=config.memory_bytes,
            )
            if functions
            else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends processes and requests. Closed rewards score no more."""
        if self._pool is not None:
            self._pool.close()
        for judge in self._judges:
            judge.close()

    def counting_failures(self, min_jobs: int) -> AbstractContextManager[None]:
        """Makes all calls of `score` inside the block count as one batch of at least `min_jobs` jobs, of which
        reward.max_failure_rate may fail."""
        return self._failures.counting(min_jobs * len(self._config.functions))

    def score(self, jobs: Sequence[RewardJob]) -> list[RewardResult]:
        """Scores jobs; judges are asked while the processes work.

        Consumes: jobs. Waits for: answers. Unblocked by: the deadlines of every call and every request.

        Returns:
            One result per job, in the order of the jobs.
        Raises:
            RewardError: a call failed and reward.on_failure is abort, or more of them than reward.max_failure_rate, or
                a job cannot be sent. Closes the rewards.
            JudgeLostError: as before, but only because of failures that may be temporary. Closes the rewards.
            ConfigError: a function cannot be loaded, or cannot work on this machine. Closes the rewards.
        """
        answers: list[dict[str, Answer]] = [{} for _ in jobs]
        try:
            with self.counting_failures(len(jobs)):
                self._failures.expect(len(jobs) * len(self._config.functions))
                for number, name, answer in self._answers(jobs):
                    if answer.failure is not None:
                        job = jobs[number]
                        who, remedy = "the environment", _FIX_IT
                        if job.failure is None:
                            who, remedy = _who_and_remedy(self._entries[name], answer.may_pass)
                        self._failures.add(job.uid, who, answer.failure, remedy=remedy, may_pass=answer.may_pass)
                    answers[number][name] = answer
        except BaseException:
            self.close()
            raise
        return [combine(by_name, self._config) for by_name in answers]

    def _answers(self, jobs: Sequence[RewardJob]) -> Iterator[tuple[int, str, Answer]]:
        """Yields (index of the job, name of the entry, answer) for every job and entry, in any order."""
        places = [place for place, job in enumerate(jobs) if job.failure is None]
        for place, job in enumerate(jobs):
            if job.outcome is None:
                continue
            for entry in self._config.functions:
                if job.failure is not None or isinstance(entry, EnvironmentReward):
                    yield place, entry.name, job.outcome
        for number, name, answer in self._ask([jobs[place] for place in places]):
            yield places[number], name, answer

    def _ask(self, jobs: Sequence[RewardJob]) -> Iterator[tuple[int, str, Answer]]:
        asked: list[tuple[str, Iterable[tuple[int, Answer]]]]
        asked = [(judge.name, judge.score(jobs)) for judge in self._judges]
        if self._pool is not None:
            for number, function, answer in self._pool.score(jobs):
                yield number, self._names[function], answer
        asked += [(name, model.score(jobs)) for name, model in self._models.items()]
        for name, replies in asked:
            for number, answer in replies:
                yield number, name, answer


class CustomRewards:
    """The user's own manager (reward.manager) behind the interface of `Rewards`; what it returns is checked."""

    def __init__(self, config: RewardConfig) -> None:
        """Imports the class and calls it with the config, in this process.

        Raises:
            ConfigError: it cannot be imported, its constructor raised, or it has no score and close.
        """
        assert config.manager is not None
        self._config = config
        try:
            self._manager: Any = _load_manager(config.manager)(config)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"reward.manager={config.manager}: {describe_error(error)}") from error
        self._failures = FailurePolicy(config)
        absent = [name for name in ("score", "close") if not callable(getattr(self._manager, name, None))]
        if absent:
            raise ConfigError(f"reward.manager={config.manager} has no method {absent[0]}; it needs score and close")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Calls the manager's own close. Raises RewardError where that raises."""
        try:
            self._manager.close()
        except (Exception, SystemExit) as error:
            raise RewardError(f"{self._name} failed to close: {describe_error(error)}") from error

    def counting_failures(self, min_jobs: int) -> AbstractContextManager[None]:
        """Makes all calls of `score` inside the block count as one batch of at least `min_jobs` jobs, of which
        reward.max_failure_rate may fail."""
        return self._failures.counting(min_jobs)

    def score(self, jobs: Sequence[RewardJob]) -> list[RewardResult]:
        """Returns one result per job, in the order of the jobs; one without a finite score is a failure of its row.

        Raises:
            RewardError: the manager raised, returned anything but one RewardResult for each job, or reported failures
                that reward.on_failure or reward.max_failure_rate do not allow.
        """
        judged = iter(self._judge([job for job in jobs if job.failure is None]))
        value = self._config.failure_value
        results = [
            next(judged) if job.failure is None else RewardResult(score=value, failure=job.failure) for job in jobs
        ]
        with self.counting_failures(len(jobs)):
            self._failures.expect(len(jobs))
            for job, result in zip(jobs, results, strict=True):
                if result.failure is not None:
                    who = self._name if job.failure is None else "the environment"
                    self._failures.add(job.uid, who, result.failure)
        return results

    @property
    def _name(self) -> str:
        return f"reward.manager={self._config.manager}"

    def _judge(self, jobs: Sequence[RewardJob]) -> list[RewardResult]:
        try:
            returned = self._manager.score(deepcopy(jobs))
        except (Exception, SystemExit) as error:
            raise RewardError(f"{self._name} failed for rows {_rows(jobs)}: {describe_error(error)}") from error
        if not isinstance(returned, list | tuple):
            kind = type(returned).__name__
            raise RewardError(f"{self._name} returned a {kind}, expected a list of RewardResult (rows {_rows(jobs)})")
        if len(returned) != len(jobs):
            raise RewardError(f"{self._name} returned {len(returned)} for {len(jobs)} completions (rows {_rows(jobs)})")
        return [self._checked(value) for value in returned]

    def _checked(self, value: Any) -> RewardResult:
        if not isinstance(value, RewardResult):
            failure = f"returned a {type(value).__name__}, expected a RewardResult"
        elif value.failure is not None:
            failure = value.failure
        elif not isinstance(value.parts, dict):
            failure = f"returned parts that are a {type(value.parts).__name__}, expected a dict"
        elif (score := finite_number(value.score)) is None:
            failure = f"returned the score {value.score!r}, expected a finite number"
        else:
            return RewardResult(score=score, parts=finite_numbers(value.parts))
        return RewardResult(score=self._config.failure_value, failure=failure)


class FailurePolicy:
    """Stops the run where a call fails that must not, or too many have; else warns of each kind of failure once."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._min_calls: int | None = None
        self._num_calls = self._num_failed = self._num_passing = 0
        self._first = ""
        self._kinds: set[tuple[str, str]] = set()
        """(who failed, type of error) of all failures so far in this run: each kind is warned of once."""

    @contextmanager
    def counting(self, min_calls: int) -> Iterator[None]:
        """Counts the calls made inside the block as one batch: each failure compares the share of failed calls with
        reward.max_failure_rate. The share is of the calls made so far, or of `min_calls`, which are sure to be made, if
        these are more. Inside another such block it does nothing."""
        if self._min_calls is not None:
            yield
            return
        self._min_calls, self._first = min_calls, ""
        self._num_calls = self._num_failed = self._num_passing = 0
        try:
            yield
        finally:
            self._min_calls = None

    def expect(self, num_calls: int) -> None:
        """Counts calls that are about to be made."""
        self._num_calls += num_calls

    def add(self, uid: str, who: str, failure: str, *, remedy: str = _FIX_IT, may_pass: bool = False) -> None:
        """Counts a failure.

        Args:
            remedy: what can be done about it, as the beginning of a sentence.
            may_pass: as in `Answer`.
        Raises:
            RewardError, JudgeLostError: as `Rewards.score`; names the first failure, and what can be done.
        """
        assert self._min_calls is not None
        config = self._config
        said = f"{who} failed for row {uid}: {failure}"
        self._first = self._first or said
        self._num_failed += 1
        self._num_passing += may_pass
        if config.on_failure == "abort":
            raise (JudgeLostError if may_pass else RewardError)(
                f"{self._first}. {remedy}, or set reward.on_failure=value to score such rows "
                f"reward.failure_value={config.failure_value:g}, or =mask to leave them out"
            )
        num_calls = max(self._min_calls, self._num_calls)
        max_failed = config.max_failure_rate * num_calls
        if self._num_failed > max_failed:
            raise (JudgeLostError if self._num_failed - self._num_passing <= max_failed else RewardError)(
                f"{self._num_failed} of {num_calls} reward calls failed, more than "
                f"reward.max_failure_rate={config.max_failure_rate:g} allows. The first: {self._first}"
            )
        kind = who, failure.partition(":")[0]
        if kind not in self._kinds:
            self._kinds.add(kind)
            warn(f"{said} (reward.on_failure={config.on_failure}; reward/failed counts such rows)")


def make_rewards(config: RewardConfig, models: Mapping[str, Scorer] | None = None) -> Rewards | CustomRewards:
    """Builds what judges the completions of a run: `Rewards`, with `models` for its entries of type model, or the class
    that reward.manager names."""
    return Rewards(config, models) if config.manager is None else CustomRewards(config)


def check_rewards(config: RewardConfig) -> None:
    """Checks what can be before a model is loaded: functions import and take their parameters, judges have their key.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    if config.manager is not None:
        _load_manager(config.manager)
    for entry in config.functions:
        if isinstance(entry, JudgeReward):
            Judge(entry).close()
    functions = [entry for entry in config.functions if isinstance(entry, FunctionReward)]
    if functions and config.manager is None:
        check_functions(functions)


def _load_manager(spec: str) -> Callable[[RewardConfig], Any]:
    return load_function(spec, key="reward.manager", expected="a class Manager(config) with score(jobs) and close()")


def _who_and_remedy(
    entry: FunctionReward | JudgeReward | ModelReward | EnvironmentReward, may_pass: bool
) -> tuple[str, str]:
    """Returns how errors name an entry that failed, and what can be done about it."""
    if isinstance(entry, FunctionReward):
        return f"reward function {entry.function}", "Fix the function"
    has_own_name = entry.name != type(entry).model_fields["name"].default
    who = f"reward {entry.type} {entry.name}" if has_own_name else f"reward {entry.type}"
    if isinstance(entry, JudgeReward):
        return who, (
            "Check its base_url, model and api_key_env, raise its max_retries or timeout_seconds"
            if may_pass
            else "Check its base_url, model, api_key_env, prompt_template and score_pattern"
        )
    return who, _FIX_IT


def _rows(jobs: Sequence[RewardJob]) -> str:
    """Names the jobs' rows, as many as a message can hold."""
    uids = list(dict.fromkeys(job.uid for job in jobs))
    return listed(uids, most=4)
