"""Rows that a task of reasoning-gym generates."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.config import ConfigError, DataError, ReasoningGymTask

INSTALL = "pip install reasoning-gym"


def check_task(path: Path) -> ReasoningGymTask:
    """Returns the task that a file names.

    Raises:
        DataError: the file cannot be read, reasoning-gym is not installed, or it has no such task or argument.
    """
    return _open(path)[0]


def task_rows(path: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (origin, values) for every problem: a prompt, the answer as response and ground truth, and in extra_info
    what the reward function needs to generate the problem again.

    Raises: as `check_task`.
    """
    task, dataset = _open(path)
    for index in range(task.size):
        problem = dataset[index]
        # A problem with several right answers has none to show: the reward function computes the score.
        answer = "" if problem["answer"] is None else str(problem["answer"])
        yield (
            f"{name} problem {index}",
            {
                "prompt": problem["question"],
                "response": answer,
                "data_source": f"reasoning_gym/{task.task}",
                "reward_model": {"ground_truth": answer},
                "extra_info": {"reasoning_gym": {**task.model_dump(mode="json"), "index": index}},
            },
        )


def _open(path: Path) -> tuple[ReasoningGymTask, Any]:
    try:
        task = ReasoningGymTask.load(path)
    except ConfigError as error:
        raise DataError(str(error)) from None
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(
            f"{path} names a task of reasoning-gym, which cannot be imported ({error}); {INSTALL}"
        ) from None
    try:
        return task, reasoning_gym.create_dataset(task.task, size=task.size, seed=task.seed, **task.arguments)
    except Exception as error:  # its configs check themselves with assertions
        raise DataError(
            f"{path}: reasoning-gym makes no task={task.task} with arguments={task.arguments} "
            f"({type(error).__name__}: {error}); see reasoning_gym.factory.DATASETS for the names"
        ) from None
