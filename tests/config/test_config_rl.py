from typing import get_args

import pytest

from shardwise.algorithms.masked import Aggregation
from shardwise.config import AlgorithmConfig, ConfigError, RolloutConfig


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (RolloutConfig, "engine", "vllm"),
        (RolloutConfig, "num_prompts", 0),
        (RolloutConfig, "group_size", 0),
        (RolloutConfig, "temperature", 0),
        (RolloutConfig, "max_response_tokens", 0),
        (RolloutConfig, "max_concurrent_sequences", 0),
        (AlgorithmConfig, "advantage", "gae"),
        (AlgorithmConfig, "advantage_scale", "mean"),
        (AlgorithmConfig, "policy_loss", "ppo"),
        (AlgorithmConfig, "clip_low", 0),
        (AlgorithmConfig, "clip_low", 1),
        (AlgorithmConfig, "clip_high", 0),
        (AlgorithmConfig, "dual_clip", 1),
        (AlgorithmConfig, "aggregation", "mean"),
        (AlgorithmConfig, "aggregation_divisor", 0),
        (AlgorithmConfig, "kl_coef", -0.1),
        (AlgorithmConfig, "kl_estimator", "k4"),
        (AlgorithmConfig, "kl_in", "both"),
        (AlgorithmConfig, "num_minibatches", 0),
        (AlgorithmConfig, "num_epochs", 0),
    ],
)
def test_value_out_of_range_is_refused(cls, key, value):
    with pytest.raises(ConfigError, match=rf"^test: {key}={value!r}: input should be "):
        cls.parse({key: value}, origin="test")


@pytest.mark.parametrize(
    ("aggregation", "divisor"),
    [("seq-mean-token-sum-norm", None), *((mode, 8) for mode in get_args(Aggregation) if not mode.endswith("norm"))],
)
def test_divisor_belongs_to_one_aggregation(aggregation, divisor):
    tree = {"aggregation": aggregation, "aggregation_divisor": divisor}
    with pytest.raises(ConfigError, match=rf"^test: aggregation={aggregation} with aggregation_divisor="):
        AlgorithmConfig.parse(tree, origin="test")


def test_config_and_algorithms_know_the_same_aggregations():
    annotation = AlgorithmConfig.model_fields["aggregation"].annotation
    assert set(get_args(annotation)) == set(get_args(Aggregation))
    norm = AlgorithmConfig(aggregation="seq-mean-token-sum-norm", aggregation_divisor=256)
    assert norm.aggregation_divisor == 256


@pytest.mark.parametrize("scale", ["std", "none"])
def test_scale_belongs_to_grpo(scale):
    with pytest.raises(ConfigError) as error:
        AlgorithmConfig.parse({"advantage": "rloo", "advantage_scale": scale}, origin="test")
    assert str(error.value) == f"test: advantage_scale={scale} has no effect with advantage=rloo; remove it"
    assert AlgorithmConfig(advantage="rloo").advantage_scale is None
    assert AlgorithmConfig(advantage="grpo", advantage_scale=scale).advantage_scale == scale
