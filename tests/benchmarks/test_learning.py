"""The learning benchmark: when a target is met, what its page says, and that its commands are valid."""

import json
from pathlib import Path

import pytest

from benchmarks.learning import REINFORCEMENT, VARIANTS, Task, config_of, is_met
from benchmarks.learning_page import kind_of, results_page, sparkline
from benchmarks.preference_problems import PreferenceFiles
from shardwise.config import RECIPES
from shardwise.data import ProblemFiles

TASK = Task(
    folder=Path("f"),
    problems=ProblemFiles(*[Path(name) for name in ("a", "b", "c", "d")]),
    preferences=PreferenceFiles(*[Path(name) for name in ("e", "f", "g", "h")]),
    start=Path("s"),
    seed=3,
)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_valid_command(name):
    variant = VARIANTS[name]
    changes = [f"{key}={json.dumps(value)}" for key, value in variant.overrides.items()]
    tree = config_of(TASK, variant, Path("out"))
    config = RECIPES[variant.command].load(
        None, [f"{key}={json.dumps(value)}" for key, value in tree.items()] + changes
    )
    assert config.model.path == "s"
    assert (config.trainer.output_dir, config.trainer.seed) == ("out", 3)
    if name in REINFORCEMENT:
        assert config.trainer.validate_every_steps > 0


@pytest.mark.parametrize(
    ("name", "start", "end", "met"),
    [
        ("grpo", 0.4, 0.51, True),
        ("grpo", 0.4, 0.49, False),
        ("kto", 0.0, 0.1, True),
        ("dpo", 0.0, -0.1, False),
        ("reward_model", 0.5, 0.9, True),
        ("reward_model", 0.5, 0.89, False),
        ("distill", 0.2, 0.1, True),
        ("distill", 0.2, 0.11, False),
    ],
)
def test_targets(name, start, end, met):
    assert is_met(name, start, [(10, start), (20, end)]) == met


def test_a_curve_is_drawn_from_zero_to_the_highest_value():
    assert sparkline([0.0, 0.5, 1.0], 1.0) == "▁▅█"
    assert sparkline([-1.0, 2.0], 1.0) == "▁█"
    assert sparkline([0.0], 0.0) == "▁"


def test_the_page_has_a_row_for_every_variant_in_the_table_of_its_kind():
    run = {"start": 0.25, "curve": [(10, 0.5), (20, 0.75)], "seconds": 9, "met": True}
    page = results_page({name: {"0": run, "1": run | {"met": False}} for name in VARIANTS})
    assert page.count("\n## ") == len({kind_of(name) for name in VARIANTS}) == 4
    for name in VARIANTS:
        assert f"| `{name}` | 0.250 / 0.250 | 0.750 / 0.750 | +0.500 | 1 of 2 | " in page
