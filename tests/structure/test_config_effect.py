"""Trap 18: a key without effect does not exist here. Every config key is read somewhere outside config/.

The check goes by the last name of a key: of two keys called `seed`, one reader covers both.
"""

import ast
from pathlib import Path

import pytest

from shardwise.config import Config, EvalConfig, RLConfig, SFTConfig, key_paths

PACKAGE = Path(__file__).parents[2] / "shardwise"
PROPERTIES = {"property", "cached_property", "computed_field"}


def leaf_paths(cls: type[Config]) -> list[str]:
    """The keys that hold values, without the groups."""
    paths = list(key_paths(cls))
    return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]


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


@pytest.mark.parametrize("cls", [SFTConfig, RLConfig, EvalConfig])
def test_every_config_key_is_read(cls):
    read = attributes_with_effect()
    unread = [path for path in leaf_paths(cls) if path.rsplit(".", 1)[-1] not in read]
    assert not unread, f"keys of {cls.__name__} that nothing reads: {', '.join(unread)}"


def test_leaf_paths_are_values_and_not_groups():
    paths = leaf_paths(RLConfig)
    assert "algorithm.clip_low" in paths
    assert "rollout.engine" in paths
    assert "algorithm" not in paths


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
