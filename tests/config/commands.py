"""The least that each command must be given, and what it says of more."""

import pytest

from shardwise.config import ConfigError, DistillConfig, PreferenceConfig, RewardModelConfig, RLConfig, SFTConfig

SFT = ["model.path=m", "data.train_files=f"]
RL = [*SFT, "reward.functions=r:score"]
EVAL = ["model.path=m", "data.validation_files=v", "reward.functions=r:score"]
GAE = [*RL, "algorithm.advantage=gae", "critic={}"]
DISTILL = [*RL, "algorithm.advantage=distill"]
TRAINING = [
    (SFTConfig, SFT),
    (PreferenceConfig, SFT),
    (RewardModelConfig, SFT),
    (DistillConfig, [*SFT, "teacher.model.path=t"]),
    (RLConfig, RL),
]
"""Every command that trains."""
BF16 = ["engine.param_dtype=bfloat16", "engine.master_dtype=bfloat16"]


def message_of(cls, overrides):
    with pytest.raises(ConfigError) as error:
        cls.load(None, overrides)
    return str(error.value).removeprefix("the command line: ")
