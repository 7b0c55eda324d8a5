from typing import get_args

import pytest

from shardwise.algorithms.masked import Aggregation
from shardwise.config import AdaptiveKl, AlgorithmConfig, ClipCov, ConfigError, CriticConfig, Gae, KlCov, RolloutConfig
from shardwise.config.algorithm import (
    Cispo,
    ClippedValueLoss,
    Grpo,
    Gspo,
    OverlongConfig,
    PpoClip,
    ReinforcePlusPlus,
    SeqMeanTokenSumNorm,
)
from shardwise.config.base import groups_of, tag_of
from shardwise.config.rl import DynamicSamplingConfig
from shardwise.config.rollout_correction import MismatchRejection, RatioWeights


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
        (RatioWeights, "high", 0),
        (RatioWeights, "level", "sequence-sum"),
        (MismatchRejection, "high", 0),
        (MismatchRejection, "estimator", "k4"),
        (MismatchRejection, "level", "sequence"),
        (OverlongConfig, "factor", 0),
        (OverlongConfig, "buffer_tokens", 0),
        (ClippedValueLoss, "clip", 0),
        (CriticConfig, "critic_warmup_steps", -1),
        (SeqMeanTokenSumNorm, "divisor", 0),
        (AlgorithmConfig, "kl_coef", -0.1),
        (AlgorithmConfig, "kl_in", "both"),
        (AlgorithmConfig, "num_minibatches", 0),
        (AlgorithmConfig, "num_epochs", 0),
    ],
)
def test_value_out_of_range_is_refused(cls, key, value):
    with pytest.raises(ConfigError, match=rf"(^test:|\n) *{key}={value!r}: input should be "):
        cls.parse({key: value}, origin="test")


def test_config_and_algorithms_know_the_same_aggregations():
    names = {tag_of(choice)[1] for choice in groups_of(AlgorithmConfig.model_fields["aggregation"].annotation)}
    assert names - {"custom"} == set(get_args(Aggregation))


def test_an_empty_range_of_covariances_is_refused():
    with pytest.raises(ConfigError) as error:
        AlgorithmConfig.parse({"policy_loss": {"name": "clip_cov", "cov_low": 5}}, origin="test")
    assert str(error.value) == "test: policy_loss: cov_low=5.0 and cov_high=5.0 leave nothing between them"
