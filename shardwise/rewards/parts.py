"""The parts of a reward: the score of each entry of reward.functions by the entry's name, and what else it returned: by
their own names where it is the only entry, as NAME/part where there are several."""

from collections.abc import Mapping

from shardwise.config import RewardConfig
from shardwise.rewards.base import Answer, RewardResult


def combine(answers: Mapping[str, Answer], config: RewardConfig) -> RewardResult:
    """Combines the answers to one job to their weighted sum, in the order of reward.functions.

    Args:
        answers: entry name -> answer.
    """
    score = 0.0
    parts: dict[str, float] = {}
    failures = []
    for entry in config.functions:
        answer = answers[entry.name]
        if answer.failure is not None:
            score += entry.weight * config.failure_value
            failures.append(answer.failure if _is_alone(config) else f"{entry.name}: {answer.failure}")
            continue
        score += entry.weight * answer.score
        parts |= {_name(part, entry.name, config): value for part, value in answer.parts.items()}
        parts[entry.name] = answer.score
    return RewardResult(score=score, parts=parts, failure="; ".join(failures) or None)


def is_correct(reward: float, parts: Mapping[str, float], config: RewardConfig) -> bool:
    """Returns whether the first of reward.functions calls it correct: by its "acc" if it returned one, else by its
    score.

    Other entries and all weights do not matter: a format or length reward does not change accuracy. If there is no part
    by the first entry's name, its call failed, which is not correct. A manager's results go by a part "acc", else by
    the reward.
    """
    if config.manager is not None:
        return parts["acc"] > 0 if "acc" in parts else reward >= config.correct_at
    first = config.functions[0].name
    verdict = _name("acc", first, config)
    if verdict in parts:
        return parts[verdict] > 0
    return first in parts and parts[first] >= config.correct_at


def _name(part: str, entry: str, config: RewardConfig) -> str:
    return part if _is_alone(config) else f"{entry}/{part}"


def _is_alone(config: RewardConfig) -> bool:
    return len(config.functions) == 1
