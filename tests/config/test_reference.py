"""The generated config reference."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, get_args

import pytest
from pydantic import Field

from shardwise.config import (
    RECIPES,
    Choice,
    Config,
    RecipeConfig,
    RLConfig,
    SFTConfig,
    key_paths,
)
from shardwise.config.base import groups_of, tag_of
from shardwise.config.reference import markdown, page

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


class Plain(Choice):
    """Nothing to set."""

    name: Literal["plain"] = "plain"


class Sharp(Choice):
    """With | a bar."""

    name: Literal["sharp"] = "sharp"
    edge: float = 0.5
    """How sharp."""


class Toy(Config):
    """A toy."""

    choice: Annotated[Plain | Sharp, Field(discriminator="name")] = Sharp()
    """Which one."""


def test_row_holds_key_default_choices_and_meaning():
    lines = markdown(RLConfig, title="rl").splitlines()
    assert lines[0] == "## rl"
    assert "| `reward.functions` | required | " in "\n".join(lines)
    assert (
        "| `algorithm.kl_in` | `loss` of `loss`, `reward` | Add the KL term to the loss, or subtract it from the "
        in ("\n".join(lines))
    )


def test_choices_are_rows_with_their_meaning_and_their_keys_below():
    assert markdown(Toy, title="toy").splitlines()[6:] == [
        "| `choice` | `sharp` of `plain`, `sharp` | Which one. |",
        "| `choice.name` = `plain` | | Nothing to set. |",
        "| `choice.name` = `sharp` | | With \\| a bar. |",
        "| `choice.edge` | `0.5` | How sharp. |",
    ]


@pytest.mark.parametrize(
    "row",
    [
        "| `algorithm.advantage` | `grpo` of `grpo`, `grpo_passk`, `gdpo`, `rloo`, `reinforce_plus_plus`, ",
        "| `algorithm.advantage.name` = `rloo` | | Reward - mean of the others in the group. |",
        "| `algorithm.policy_loss.name` = `cispo` | | The clipped ratio, detached, ",
        "| `algorithm.kl_controller.target` | required | The mean KL divergence per token to hold, in nats. |",
        "| `reward.functions.type` = `judge` | | A language model behind an OpenAI-compatible endpoint ",
    ],
)
def test_rows_of_choices_in_the_config_of_reinforcement_learning(row):
    assert f"\n{row}" in markdown(RLConfig, title="rl")


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


def expected_rows(cls, prefix=""):
    """(key, value of the tag or None) of every row: values, groups that may be absent, lists of groups, choices."""
    for name, field in cls.model_fields.items():
        path, groups = f"{prefix}{name}", groups_of(field.annotation)
        if groups != [field.annotation]:
            yield path, None
        for group in groups:
            tag = tag_of(group) if len(groups) > 1 else None
            if tag is not None:
                yield f"{path}.{tag[0]}", tag[1]
            yield from (row for row in expected_rows(group, f"{path}.") if tag is None or row[0] != f"{path}.{tag[0]}")


WHOSE = {
    "engine": None,
    "reference": "engine",
    "critic.engine": "engine",
    "teachers.engine": "engine",
    "reward.functions.engine": None,
}


@pytest.mark.parametrize(("engine", "other"), WHOSE.items())
def test_layouts_that_follow_the_main_one_say_so(engine, other):
    default = "`float32`" if other is None else f"as `{other}.param_dtype`"
    rows = [row for row in markdown(RLConfig, title="rl").splitlines() if row.startswith(f"| `{engine}.param_dtype` |")]
    assert [row.split(" | ")[1].partition(" of ")[0] for row in rows] == [default]


def test_a_critic_has_no_adapters_unless_it_is_given_some():
    assert "| `critic.engine.lora` | `null` |" in markdown(RLConfig, title="rl")


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_has_a_row_and_a_meaning(name):
    """So have groups that may be absent, lists of groups, and every choice of a union with the keys of its own."""
    rows = [line for line in markdown(RECIPES[name], title=name).splitlines() if line.startswith("| `")]
    found = [(row.split("`")[1], row.split("`")[3] if row.split("`")[2] == " = " else None) for row in rows]
    assert found == list(expected_rows(RECIPES[name]))
    assert {key for key, _ in found} == {key for key in key_paths(RECIPES[name]) if not is_plain_group(name, key)}
    assert all(len(row.rsplit("|", 2)[1].strip()) > 5 for row in rows)


def is_plain_group(recipe, key):
    """A group that is always there: it has no row, its keys have."""
    *parents, last = key.split(".")
    nodes = [RECIPES[recipe]]
    for name in parents:
        nodes = [group for node in nodes if name in node.model_fields for group in
                 groups_of(node.model_fields[name].annotation)]  # fmt: skip
    annotations = [node.model_fields[last].annotation for node in nodes if last in node.model_fields]
    return all(groups_of(annotation) == [annotation] for annotation in annotations)


def test_the_page_holds_every_recipe():
    assert set(RECIPES.values()) == set(get_args(RecipeConfig))


def test_page_in_docs_is_current():
    assert page(RECIPES) in PAGE.read_text(encoding="utf-8"), "run `make docs`"


def test_the_page_has_every_row_of_every_recipe_once_and_says_whose_it_is():
    commands, owner = Counter(), ""
    for line in page(RECIPES).splitlines():
        if line.startswith("## "):
            owner = line.removeprefix("## ")
        elif line.startswith("| `") and owner in RECIPES:
            commands[line, owner] += 1
        elif line.startswith("| `"):
            row, _, names = line.removesuffix(" |").rpartition("| ")
            for name in RECIPES if names == "all" else names.split(", "):
                commands[row + "|", name] += 1
    expected = Counter(
        (line, name)
        for name, config in RECIPES.items()
        for line in markdown(config, title=name).splitlines()
        if line.startswith("| `")
    )
    assert commands == expected


def test_what_belongs_together_stays_together_on_the_page():
    """A key that a choice has follows it."""

    class Rounded(Choice):
        """A table."""

        name: Literal["rounded"] = "rounded"
        width: int = 3

    class Square(Config):
        """Of one command."""

        table: Plain | Rounded = Plain()
        legs: int = 4

    class Group(Config):
        legs: int = 4

    class One(Config):
        group: Group = Group()

    class Two(Config):
        group: Group = Group()
        table: Square | None = None

    text = page({"one": One, "two": Two})
    shared, rest = text.split("## one")
    assert "| `group.legs` | `4` |  | all |" in shared
    assert "All of its keys are above." in rest
    keys = [line.split("`")[1] for line in rest.splitlines() if line.startswith("| `")]
    assert keys == ["table", "table.table", "table.table.name", "table.table.name", "table.table.width", "table.legs"]
