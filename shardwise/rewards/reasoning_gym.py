"""Scores answers to reasoning-gym's problems as its tasks do."""

import json
from functools import lru_cache
from typing import Any


def reasoning_gym_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], tag: str | None = None
) -> float:
    """Returns the score that the row's task (a `.yaml` file among the data files) gives, mostly from 0 to 1.

    Args:
        tag: takes what the last `<tag>...</tag>` holds for the answer, nothing where there is none; None takes the
            whole completion.
    Raises:
        ValueError: the row is none of reasoning-gym's, or this version generates another problem for it.
    """
    if "reasoning_gym" not in extra_info:
        raise ValueError(
            f"a row from {data_source} has no extra_info.reasoning_gym, which names its task; score it by another "
            "function"
        )
    dataset, problem = _problem(json.dumps(extra_info["reasoning_gym"], sort_keys=True))
    if ground_truth != ("" if problem["answer"] is None else str(problem["answer"])):
        raise ValueError(
            f"reasoning-gym makes another problem of the row than the one it was asked ({data_source}, its answer is "
            f"{problem['answer']!r}, the row's {ground_truth!r}); score with the version that made the rows"
        )
    answer: str | None = solution_str.strip()
    if tag is not None:
        answer = last_in_tag(solution_str, tag)
    return float(dataset.score_answer(answer, entry=problem))


def last_in_tag(text: str, tag: str) -> str | None:
    """Returns what the last `<tag>...</tag>` holds, without space around it; None where there is none."""
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside.partition(f"</{tag}>")[0].strip() if opening and closing else None


@lru_cache(maxsize=4096)
def _problem(row: str) -> tuple[Any, dict[str, Any]]:
    """Generates the task and the problem of a row again: they hold what JSON could not."""
    made = json.loads(row)
    dataset = _dataset(json.dumps({key: value for key, value in made.items() if key != "index"}, sort_keys=True))
    return dataset, dataset[made["index"]]


@lru_cache(maxsize=64)
def _dataset(task: str) -> Any:
    import reasoning_gym

    made = json.loads(task)
    return reasoning_gym.create_dataset(made["task"], size=made["size"], seed=made["seed"], **made["arguments"])
