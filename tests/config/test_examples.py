"""Every example is a config that its command takes."""

from pathlib import Path

import pytest

from shardwise.config import (
    DistillConfig,
    EvalConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
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
    "preference_dpo.yaml": PreferenceConfig,
    "reward_model.yaml": RewardModelConfig,
    "distill.yaml": DistillConfig,
}


def test_every_example_is_listed_here():
    assert {path.name for path in EXAMPLES.glob("*.yaml")} == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_an_example_is_valid_and_what_it_sets_is_kept(name):
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    config = CLASSES[name].load(EXAMPLES / name)
    assert f"path: {config.model.path}\n" in text
    assert f"param_dtype: {config.engine.param_dtype}\n" in text
