"""Functions by name or by import path, the same way wherever one is chosen."""

from typing import get_args

import pytest

from shardwise.config import AlgorithmConfig, Config, ConfigError, Custom, RecipeConfig
from shardwise.config.base import groups_of, tag_of
from shardwise.config.custom import named

PLACES = {
    "RLConfig": {
        *("algorithm.advantage", "algorithm.policy_loss", "algorithm.aggregation", "algorithm.kl_estimator"),
        *("algorithm.kl_controller", "critic.value_loss"),
        *("algorithm.rollout_correction.weights", "algorithm.rollout_correction.rejection"),
    },
    "PreferenceConfig": {"loss"},
    "RewardModelConfig": {"loss"},
    "DistillConfig": {"distillation.divergence"},
}


def choices_by_name(cls: type[Config], prefix: str = ""):
    """(key, whether it takes an import path) of every key where one of several functions is chosen by its name."""
    for name, field in cls.model_fields.items():
        groups = groups_of(field.annotation)
        if len(groups) > 1 and all(tag_of(group) and tag_of(group)[0] == "name" for group in groups):
            yield prefix + name, any(issubclass(group, Custom) for group in groups)
            continue
        for group in groups:
            yield from choices_by_name(group, f"{prefix}{name}.")


@pytest.mark.parametrize("cls", get_args(RecipeConfig))
def test_every_function_that_is_chosen_by_name_may_be_ones_own(cls):
    found = dict(choices_by_name(cls))
    assert set(found) == PLACES.get(cls.__name__, set())
    assert all(found.values())


def test_parameters_are_given_beside_the_import_path():
    """Also as an override on the command line, and never to a bare path."""
    long = AlgorithmConfig.load(None, ["aggregation={name: custom, function: rules.py:mine, parameters: {a: 2}}"])
    assert long.aggregation == Custom(function="rules.py:mine", parameters={"a": 2})
    with pytest.raises(ConfigError, match=r"aggregation\.function: required, but not given"):
        AlgorithmConfig.parse({"aggregation": "custom"}, origin="test")
    with pytest.raises(ConfigError, match=r"aggregation\.power: name=custom has no such key; it has function, param"):
        AlgorithmConfig.parse({"aggregation": {"name": "custom", "function": "a:b", "power": 1}}, origin="test")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("grpo", {"name": "grpo"}),
        ("rules.py:mine", {"name": "custom", "function": "rules.py:mine"}),
        ({"scale": 1}, {"name": "first", "scale": 1}),
        ({"name": "second"}, {"name": "second"}),
        (3, 3),
    ],
)
def test_a_name_stands_for_its_choice_and_keys_alone_for_the_default_one(given, read):
    assert named("first").func(given) == read
