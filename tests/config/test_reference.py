"""The generated config reference."""

from pathlib import Path

import pytest

from shardwise.config import EvalConfig, RLConfig, SFTConfig, key_paths
from shardwise.config.reference import markdown

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
VALUES_WITH_KEYS = {
    "engine.lora",
    "engine.module_precision",
    "reference",
    "reference.module_precision",
    "reward.functions",
}
RECIPES = {"sft": SFTConfig, "rl": RLConfig, "eval": EvalConfig}


def test_row_holds_key_default_choices_and_meaning():
    lines = markdown(RLConfig, title="rl").splitlines()
    assert lines[0] == "## rl"
    assert "| `reward.functions` | required | " in "\n".join(lines)
    assert (
        "| `algorithm.kl_estimator` | `k3` of `k1`, `k2`, `k3` | The per-token estimator of that divergence. |" in lines
    )


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("trainer.seed", "`0`"),
        ("engine.ulysses_size", "`1`"),
        ("trainer.max_grad_norm", "`1.0`"),
        ("engine.reshard_after_forward", "`true`"),
        ("engine.apply_tiled_mlp", "`false`"),
        ("engine.fsdp_size", "`null`"),
        ("engine.lora", "`null`"),
        ("engine.lora.rank", "`16`"),
        ("engine.module_precision", "`[]`"),
        ("engine.module_precision.module", "required"),
        ("engine.wrap_policy.moe_experts", "`[]`"),
        ("trainer.module_learning_rates", "`{}`"),
        ("trainer.adam_betas", "`[0.9, 0.95]`"),
    ],
)
def test_default_is_written_as_in_yaml(key, default):
    """0 is not false and 1 is not true, though Python holds them equal."""
    assert f"\n| `{key}` | {default} | " in markdown(SFTConfig, title="sft")


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_has_a_row_and_a_meaning(name):
    """So have groups that may be absent, and lists of groups."""
    keys = list(key_paths(RECIPES[name]))
    values = [key for key in keys if key in VALUES_WITH_KEYS or not any(k.startswith(f"{key}.") for k in keys)]
    rows = [line for line in markdown(RECIPES[name], title=name).splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == values
    assert all(len(row.rsplit("|", 2)[1].strip()) > 10 for row in rows)


@pytest.mark.parametrize("name", RECIPES)
def test_page_in_docs_is_current(name):
    assert markdown(RECIPES[name], title=name) in PAGE.read_text(encoding="utf-8"), "run `make docs`"
