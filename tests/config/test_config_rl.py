from typing import get_args

import pytest

from shardwise.algorithms.masked import Aggregation
from shardwise.config import AdaptiveKl, AlgorithmConfig, ClipCov, ConfigError, CriticConfig, Gae, KlCov, RolloutConfig
from shardwise.config.algorithm import (
    Cispo,
    Grpo,
    Gspo,
    OverlongConfig,
    PpoClip,
    ReinforcePlusPlus,
    RejectionConfig,
    WeightsConfig,
)
from shardwise.config.rl import DynamicSamplingConfig


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (RolloutConfig, "engine", "vllm"),
        (RolloutConfig, "num_prompts", 0),
        (RolloutConfig, "group_size", 0),
        (RolloutConfig, "temperature", 0),
        (RolloutConfig, "max_response_tokens", 0),
        (RolloutConfig, "max_concurrent_sequences", 0),
        (DynamicSamplingConfig, "max_rounds", 0),
        (Grpo, "scale", "mean"),
        (ReinforcePlusPlus, "gamma", 1.5),
        (Gae, "gamma", -0.1),
        (Gae, "lam", 1.1),
        (PpoClip, "clip_low", 0),
        (PpoClip, "clip_low", 1),
        (PpoClip, "clip_high", 0),
        (PpoClip, "dual_clip", 1),
        (Gspo, "clip_low", 1),
        (Cispo, "clip_low", 0),
        (ClipCov, "clip_low", 1),
        (ClipCov, "fraction", 0),
        (KlCov, "fraction", 1.5),
        (KlCov, "coef", -1),
        (AdaptiveKl, "horizon", 0),
        (WeightsConfig, "high", 0),
        (WeightsConfig, "level", "sequence-sum"),
        (RejectionConfig, "high", 0),
        (RejectionConfig, "estimator", "k4"),
        (RejectionConfig, "level", "sequence"),
        (OverlongConfig, "factor", 0),
        (OverlongConfig, "buffer_tokens", 0),
        (CriticConfig, "value_clip", 0),
        (CriticConfig, "policy_waits_steps", -1),
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
    with pytest.raises(ConfigError, match=rf"(^test:|\n) *{key}={value!r}: input should be "):
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


def test_an_empty_range_of_covariances_is_refused():
    with pytest.raises(ConfigError) as error:
        AlgorithmConfig.parse({"policy_loss": {"name": "clip_cov", "cov_low": 5}}, origin="test")
    assert str(error.value) == "test: policy_loss: cov_low=5.0 and cov_high=5.0 leave nothing between them"
