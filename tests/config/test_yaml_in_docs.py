"""Every piece of a config that README.md or a page in docs shows is one that a command takes."""

import re
from pathlib import Path

import pytest
import yaml

from shardwise.config import RECIPES

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^( *)```ya?ml\n(.*?)^\1```$", re.S | re.M)
REQUIRED = {
    "model": {"path": "given"},
    "data": {"train_files": "given.jsonl"},
    "reward": {"functions": ["given.py:reward"]},
}
"""What a piece does not say and a config needs."""
COMMANDS = ("rl", "sft", "preference", "reward-model", "distill", "eval")
NO_CONFIGS = {("docs/rewards.md", "task")}
"""Pieces of other files, by their first key."""


def blocks():
    """(page, line, tree) of every block of YAML."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            yield path.relative_to(ROOT).as_posix(), line, yaml.safe_load(block[2])


def command_of(tree):
    """The first command whose config has every key of a piece; None where it is a piece of something else."""
    return next((name for name in COMMANDS if tree.keys() <= RECIPES[name].model_fields.keys()), None)


def test_only_pieces_of_other_files_are_no_configs():
    """A key that no command has would leave a piece out of the test below."""
    assert set(COMMANDS) == set(RECIPES)
    assert {(page, next(iter(tree))) for page, _, tree in blocks() if command_of(tree) is None} == NO_CONFIGS


@pytest.mark.parametrize(
    ("page", "tree"),
    [pytest.param(page, tree, id=f"{page}:{line}") for page, line, tree in blocks() if command_of(tree)],
)
def test_a_piece_of_a_config_is_taken_with_what_it_leaves_out(page, tree):
    cls = RECIPES[command_of(tree)]
    required = {key: value for key, value in REQUIRED.items() if key in cls.model_fields}
    whole = required | {
        key: {**required.get(key, {}), **value} if isinstance(value, dict) else value for key, value in tree.items()
    }
    if {"type": "environment"} in whole.get("reward", {}).get("functions", []) and "rollout" not in tree:
        whole["rollout"] = {"environment": "given.py:Given"}
    cls.parse(whole, origin=page)
