"""Trap 18: a key without effect does not exist here. Every config key is read somewhere outside config/, or is a
parameter of the function that it belongs to.

The first check goes by the last name of a key: of two keys called `seed`, one reader covers both. The keys of a choice
that names a function reach it all at once, through `arguments()`; they are its parameters, neither more nor fewer.
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from shardwise.algorithms import (
    bradley_terry,
    clip_cov,
    clip_cov_selection,
    clipped_value_loss,
    gae,
    gdpo,
    gigpo,
    gpg,
    kl_cov,
    kl_cov_selection,
    kto,
    maxrl,
    remax,
    reverse_kl_advantages,
    rollout_rejection,
    rollout_weights,
)
from shardwise.config import (
    AlgorithmConfig,
    Choice,
    Config,
    CriticConfig,
    PreferenceConfig,
    RecipeConfig,
    RewardModelConfig,
    RLConfig,
    RolloutCorrectionConfig,
    key_paths,
)
from shardwise.config.base import groups_of, tag_of
from shardwise.recipes.advantages import ADVANTAGES
from shardwise.recipes.losses import POLICY_LOSSES, PREFERENCE_LOSSES

PACKAGE = Path(__file__).parents[2] / "shardwise"
PROPERTIES = {"property", "cached_property", "computed_field"}

UNIONS: dict[type[Config], dict[str, dict[str, tuple[Callable[..., Any], ...]]]] = {
    AlgorithmConfig: {
        "advantage": {name: (function,) for name, function in ADVANTAGES.items()}
        | {"gae": (gae,), "gdpo": (gdpo,), "remax": (remax,), "distill": (reverse_kl_advantages,)}
        | {"gpg": (gpg,), "maxrl": (maxrl,), "gigpo": (gigpo,)},
        "policy_loss": {name: (function,) for name, function in POLICY_LOSSES.items()}
        | {"clip_cov": (clip_cov, clip_cov_selection), "kl_cov": (kl_cov, kl_cov_selection)},
    },
    RolloutCorrectionConfig: {
        "weights": {"ratio": (rollout_weights,)},
        "rejection": {"mismatch": (rollout_rejection,)},
    },
    CriticConfig: {"value_loss": {"clipped": (clipped_value_loss,)}},
    PreferenceConfig: {"loss": {name: (function,) for name, function in PREFERENCE_LOSSES.items()} | {"kto": (kto,)}},
    RewardModelConfig: {"loss": {"bradley_terry": (bradley_terry,)}},
}
"""Where functions are chosen by name: the class, the key, and by name the functions whose parameters the keys are."""

NOT_FROM_THE_CONFIG = {clip_cov_selection: {"seed"}, gdpo: {"weights"}}
"""Parameters that change from step to step, and the weights that reward.functions have already."""

FUNCTIONS = {
    choice: functions[name]
    for cls, keys in UNIONS.items()
    for key, functions in keys.items()
    for choice in groups_of(cls.model_fields[key].annotation)
    if (name := tag_of(choice)[1]) != "custom"
}


def leaf_paths(cls: type[Config]) -> list[str]:
    """The keys that hold values, without the groups."""
    paths = list(key_paths(cls))
    return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]


def leaves_read_by_name(cls: type[Config], prefix: str = "") -> Iterator[str]:
    """Those without the keys that reach a function as its parameters; the tag of a choice is read as `name`."""
    for name, field in cls.model_fields.items():
        groups = groups_of(field.annotation)
        if not groups and (cls not in FUNCTIONS or name == cls.tag):
            yield prefix + name
        for group in groups:
            yield from leaves_read_by_name(group, f"{prefix}{name}.")


def choices_in(cls: type[Config]) -> set[type[Choice]]:
    groups = [group for field in cls.model_fields.values() for group in groups_of(field.annotation)]
    return {group for group in groups if issubclass(group, Choice)}.union(*map(choices_in, groups))


def keyword_only(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters), function
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def attributes_read(node: ast.AST) -> set[str]:
    return {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


def attributes_read_in_properties(tree: ast.AST) -> set[str]:
    """What the computed properties of a class read; its validators do not give a key an effect."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    decorators = {f: {ast.unparse(d).split("(")[0].split(".")[-1] for d in f.decorator_list} for f in functions}
    computed = [statement for f in functions if decorators[f] & PROPERTIES for statement in f.body]
    return set().union(*map(attributes_read, computed))


def attributes_with_effect() -> set[str]:
    names: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        in_config = file.relative_to(PACKAGE).parts[0] == "config"
        names |= attributes_read_in_properties(tree) if in_config else attributes_read(tree)
    return names


@pytest.mark.parametrize("cls", get_args(RecipeConfig))
def test_every_config_key_is_read(cls):
    read = attributes_with_effect()
    unread = [path for path in leaves_read_by_name(cls) if path.rsplit(".", 1)[-1] not in read]
    assert not unread, f"keys of {cls.__name__} that nothing reads: {', '.join(unread)}"


@pytest.mark.parametrize(
    "choice", FUNCTIONS, ids=lambda choice: f"{choice.__module__.rpartition('.')[2]}-{choice.__name__}"
)
def test_keys_of_a_choice_are_the_parameters_of_its_functions(choice):
    """A key more would be an error at the first step, a parameter more could not be set."""
    functions = FUNCTIONS[choice]
    parameters = set().union(*(keyword_only(f) - NOT_FROM_THE_CONFIG.get(f, set()) for f in functions))
    assert set(choice.model_fields) - {choice.tag} == parameters
    required = {name for name, field in choice.model_fields.items() if field.is_required()}
    assert not required, "a bare name stands for the defaults"


@pytest.mark.parametrize(("cls", "key"), [(cls, key) for cls, keys in UNIONS.items() for key in keys])
def test_every_function_can_be_chosen_and_every_choice_is_one(cls, key):
    names = {tag_of(choice)[1] for choice in groups_of(cls.model_fields[key].annotation)}
    assert names - {"custom"} == set(UNIONS[cls][key])


def test_choices_that_are_no_functions_are_read_by_name():
    choices = set().union(*map(choices_in, get_args(RecipeConfig)))
    assert choices >= set(FUNCTIONS)
    assert {choice.__name__ for choice in choices - set(FUNCTIONS)} == {
        *("Custom", "CustomPreference", "FixedKl", "AdaptiveKl", "FunctionReward", "JudgeReward", "ModelReward"),
        *("EnvironmentReward", "CustomEnvironment", "ToolsEnvironment", "AgentEnvironment"),
        *("EmbeddedRollout", "VllmRollout", "SglangRollout", "Colocated", "Split"),
        *("ForwardKl", "ReverseKl", "JensenShannon", "K1", "Abs", "K2", "K3", "K1Plus", "AbsPlus", "K2Plus"),
        "K3Plus",
        *("TokenMean", "SeqMeanTokenMean", "SeqMeanTokenSum", "SeqMeanTokenSumNorm", "TokenSum"),
    }


def test_leaf_paths_are_values_and_not_groups():
    paths = leaf_paths(RLConfig)
    assert "algorithm.policy_loss.clip_low" in paths
    assert "rollout.temperature" in paths
    assert "rollout.engine" not in paths
    assert "algorithm" not in paths
    by_name = list(leaves_read_by_name(RLConfig))
    assert not {"algorithm.policy_loss.clip_low", "algorithm.policy_loss", "rollout"} & set(by_name)
    assert {"algorithm.policy_loss.name", "algorithm.kl_controller.target", "reward.functions.weight"} < set(by_name)
    assert set(by_name) < set(paths)


def test_only_reading_counts_as_an_effect():
    tree = ast.parse(
        "class C:\n"
        "    @model_validator(mode='after')\n"
        "    def check(self): self.validated\n"
        "    @functools.cached_property\n"
        "    def total(self): return self.computed\n"
        "def f(config):\n"
        "    config.written = config.used\n"
        "    config['subscript'], 'text'\n"
    )
    assert attributes_read_in_properties(tree) == {"computed"}
    assert attributes_read(tree) >= {"validated", "computed", "used"}
    assert not attributes_read(tree) & {"written", "subscript", "text"}
