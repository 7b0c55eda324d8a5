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
    assert AlgorithmConfig.load(None, ["aggregation={function: rules.py:mine, parameters: {a: 2}}"]) == long
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
        ({"function": "rules.py:mine"}, {"name": "custom", "function": "rules.py:mine"}),
        ({"name": "second"}, {"name": "second"}),
        (3, 3),
    ],
)
def test_a_name_stands_for_its_choice_and_keys_alone_for_the_default_one(given, read):
    assert named("first").func(given) == read


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("-2E3", -2000.0), ("1.e+2", 100.0), ("e-6", "e-6")])
def test_numbers_with_an_exponent_are_numbers_wherever_they_stand(tmp_path, text, value):
    """YAML 1.1 asks for a dot and a sign; the parameters of a function have no type that would put it right."""
    chosen = f"{{name: custom, function: 'a.py:b', parameters: {{scale: {text}}}}}"
    (tmp_path / "a.yaml").write_text(f"policy_loss: {chosen}\n")
    for given in ((tmp_path / "a.yaml", []), (None, [f"policy_loss={chosen}"])):
        config = AlgorithmConfig.load(*given)
        assert config.policy_loss.parameters == {"scale": value}
        (tmp_path / "again.yaml").write_text(config.to_yaml())
        assert AlgorithmConfig.load(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ("{bound: .inf}", "bound=inf: numbers are finite here; null may stand for none"),
        ("{bounds: [1, .nan]}", "bounds.1=nan: numbers are finite here"),
        ("{of: {2: 0.1}}", "of.2: keys are text here; write it in quotes"),
    ],
)
def test_parameters_that_would_reach_the_ranks_as_something_else_are_refused(parameters, told):
    with pytest.raises(ConfigError, match=f"policy_loss.parameters: {told}"):
        AlgorithmConfig.load(None, [f"policy_loss={{function: 'a.py:b', parameters: {parameters}}}"])


def test_parameters_reach_the_ranks_as_they_are():
    chosen = "policy_loss={function: 'a.py:b', parameters: {a: [1, 2.5, true, null, {b: x}]}}"
    config = AlgorithmConfig.load(None, [chosen])
    assert AlgorithmConfig.model_validate_json(config.model_dump_json()) == config
    assert config.policy_loss.parameters == {"a": [1, 2.5, True, None, {"b": "x"}]}
