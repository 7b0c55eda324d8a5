"""The names of what rewards returned, and what they say of a completion."""

import pytest

from shardwise.config import RewardConfig
from shardwise.rewards import Answer, RewardResult
from shardwise.rewards.parts import combine, is_correct


def test_combine_by_hand():
    config = RewardConfig(functions=["a:x", {"function": "a:y", "weight": -2}], on_failure="value", failure_value=0.5)
    answers = {"x": Answer(score=3.0, parts={"p": 1.0}), "y": Answer(failure="broke")}
    assert combine(answers, config) == RewardResult(
        score=3.0 - 2 * 0.5, parts={"x": 3.0, "x/p": 1.0}, failure="y: broke"
    )


@pytest.mark.parametrize(
    ("reward", "parts", "correct_at", "expected"),
    [
        (1.0, {"b": 1.0}, 1.0, True),
        (0.99, {"b": 0.99}, 1.0, False),
        (0.5, {"b": 0.5}, 0.5, True),
        (0.0, {"b": 0.0, "acc": 1.0}, 1.0, True),
        (1.0, {"b": 1.0, "acc": 0.0}, 1.0, False),
        (1.0, {}, 1.0, False),  # a failed call, scored 1.0 by failure_value
    ],
)
def test_is_correct_by_hand(reward, parts, correct_at, expected):
    assert is_correct(reward, parts, RewardConfig(functions="a:b", correct_at=correct_at)) is expected


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"b": 1.0, "length": -5.0}, True),
        ({"b": 0.0, "length": 5.0}, False),
        ({"b": 0.0, "b/acc": 1.0, "length": 0.0}, True),
        ({"b": 0.0, "length": 0.0, "length/acc": 1.0}, False),
        ({"length": 5.0}, False),
    ],
)
def test_the_first_of_several_functions_says_what_is_correct(parts, expected):
    config = RewardConfig(functions=["a:b", {"function": "c:d", "name": "length", "weight": 3}])
    assert is_correct(99.0, parts, config) is expected


def test_results_of_a_manager_are_correct_by_acc_or_by_the_reward():
    config = RewardConfig(functions=[], manager="a:B", correct_at=0.5)
    assert is_correct(0.5, {}, config)
    assert not is_correct(0.4, {"b": 1.0}, config)
    assert is_correct(0.0, {"acc": 1.0}, config)
