import pytest

from shardwise.config import ConfigError, RolloutConfig
from shardwise.config.rollout import DynamicSamplingConfig


def parse(**rollout):
    return RolloutConfig.parse(rollout, origin="test")


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (RolloutConfig, "num_prompts", 0),
        (RolloutConfig, "group_size", 0),
        (RolloutConfig, "temperature", 0),
        (RolloutConfig, "temperature", 1e-46),
        (RolloutConfig, "top_k", 1 << 31),
        (RolloutConfig, "top_k", 10**20),
        (RolloutConfig, "max_response_tokens", 0),
        (RolloutConfig, "max_concurrent_sequences", 0),
        (DynamicSamplingConfig, "max_rounds", 0),
    ],
)
def test_value_out_of_range_is_refused(cls, key, value):
    with pytest.raises(ConfigError, match=rf"(^test:|\n) *{key}={value!r}: input should be "):
        cls.parse({key: value}, origin="test")


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": "sglang", "bad_token_ids": [5]}, "bad_token_ids with engine=sglang: it can give no logprobs"),
        ({"engine": "sglang", "min_p": 0.1}, r"min_p=0\.1 with engine=sglang: it cannot draw so"),
        ({"engine": "vllm", "temperature": 0.005}, "would sample at 0.01 without a word"),
        ({"engine": "vllm", "temperature": 2.5}, "engine=vllm samples at 2 at most"),
        ({"engine": "vllm", "temperature": 0.7, "top_p": 0.9, "top_k": 5}, "top_k, top_p with temperature=0.7"),
        ({"engine": "vllm", "temperature": 0.7, "min_p": 0.1}, "min_p with temperature=0.7"),
        ({"engine": "vllm", "temperature": 1.2, "bad_token_ids": [5]}, "bad_token_ids with temperature=1.2"),
    ],
)
def test_sampling_that_an_engine_cannot_give_logprobs_of_or_seeds_for_is_refused(rollout, message):
    with pytest.raises(ConfigError, match=message):
        parse(**rollout)


@pytest.mark.parametrize(
    "rollout",
    [
        {"engine": "vllm", "top_p": 0.9, "top_k": 5, "min_p": 0.1, "bad_token_ids": [5]},
        {"engine": "vllm", "temperature": 0.7},
        {"engine": "embedded", "temperature": 0.7, "top_p": 0.9},
        {"engine": "sglang", "temperature": 0.7, "top_p": 0.9, "top_k": 5},
    ],
)
def test_logprobs_of_the_policy_can_be_had_at_temperature_one_or_with_nothing_left_out(rollout):
    assert parse(**rollout).temperature == rollout.get("temperature", 1.0)
