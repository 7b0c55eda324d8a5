"""Every example is a config that its command takes, and so is every command of the README and of an example's head."""

import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from shardwise.config import (
    DistillConfig,
    EvalConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from shardwise.config.json_schema import json_schema

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
COMMAND = re.compile(r"(?:^|# +|-m )shardwise +(?:sft|rl|eval|preference|reward-model|distill) +-c examples/(.*)", re.M)
CLASSES = {
    "gsm8k_sft.yaml": SFTConfig,
    "gsm8k_sft_lora.yaml": SFTConfig,
    "long_context_sft.yaml": SFTConfig,
    "gsm8k_grpo.yaml": RLConfig,
    "gsm8k_dapo.yaml": RLConfig,
    "gsm8k_ppo.yaml": RLConfig,
    "gsm8k_eval.yaml": EvalConfig,
    "calculator_sft.yaml": SFTConfig,
    "calculator_agent.yaml": RLConfig,
    "calculator_endpoint.yaml": RLConfig,
    "preference_dpo.yaml": PreferenceConfig,
    "reward_model.yaml": RewardModelConfig,
    "distill.yaml": DistillConfig,
    "reasoning_gym_grpo.yaml": RLConfig,
    "vl_digits_sft.yaml": SFTConfig,
    "vl_digits_grpo.yaml": RLConfig,
}


def test_every_example_is_listed_here():
    assert {path.name for path in EXAMPLES.glob("*.yaml")} == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_an_example_is_valid_and_what_it_sets_is_kept(name):
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    config = CLASSES[name].load(EXAMPLES / name)
    assert f"path: {config.model.path}\n" in text
    assert f"param_dtype: {config.engine.param_dtype}\n" in text
    jsonschema.validate(yaml.safe_load(text), json_schema(CLASSES[name]))


def commands():
    """(example, its overrides) of every command that a reader is told to type."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *EXAMPLES.glob("*.yaml"))]
    for line in COMMAND.findall("\n".join(texts).replace("\\\n", " ")):
        example, *words = shlex.split(line, comments=True)
        yield example, tuple(word for word in words if "=" in word)


@pytest.mark.parametrize(("example", "overrides"), sorted(set(commands())))
def test_a_command_that_a_reader_is_told_to_type_is_valid(example, overrides):
    CLASSES[example].load(EXAMPLES / example, list(overrides))


def test_commands_are_found_with_their_overrides():
    found = list(commands())
    assert {example for example, _ in found} == set(CLASSES)
    assert (
        "preference_dpo.yaml",
        ("loss=kto", "data.train_files=labelled.jsonl", "trainer.output_dir=runs/kto"),
    ) in found
