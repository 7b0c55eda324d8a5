"""The generated config reference."""

from pathlib import Path

import pytest

from shardwise.config import EvalConfig, RLConfig, SFTConfig, key_paths
from shardwise.config.reference import markdown

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
RECIPES = {"sft": SFTConfig, "rl": RLConfig, "eval": EvalConfig}


def test_row_holds_key_default_choices_and_meaning():
    lines = markdown(RLConfig, title="rl").splitlines()
    assert lines[0] == "## rl"
    assert "| `reward.function` | required | " in "\n".join(lines)
    assert (
        "| `algorithm.kl_estimator` | `k3` of `k1`, `k2`, `k3` | The per-token estimator of that divergence. |" in lines
    )


@pytest.mark.parametrize("name", RECIPES)
def test_every_leaf_has_a_row_and_a_meaning(name):
    keys = list(key_paths(RECIPES[name]))
    leaves = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    rows = [line for line in markdown(RECIPES[name], title=name).splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == leaves
    assert all(len(row.rsplit("|", 2)[1].strip()) > 10 for row in rows)


@pytest.mark.parametrize("name", RECIPES)
def test_page_in_docs_is_current(name):
    assert markdown(RECIPES[name], title=name) in PAGE.read_text(encoding="utf-8"), "run `make docs`"
