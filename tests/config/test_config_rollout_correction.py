"""What is done about a rollout engine whose logprobs differ from the trainer's."""

import pytest

from shardwise.config import AlgorithmConfig, ConfigError, RolloutCorrectionConfig
from shardwise.config.rollout_correction import MismatchRejection, RatioWeights


def parse(cls, **tree):
    return cls.parse(tree, origin="test")


def message_of(cls, **tree):
    with pytest.raises(ConfigError) as error:
        parse(cls, **tree)
    return str(error.value).removeprefix("test: ")


@pytest.mark.parametrize(
    ("mode", "low"),
    [("mask", None), ("truncate", 0.5)],
)
def test_the_lower_bound_belongs_to_masking_weights(mode, low):
    assert message_of(RatioWeights, mode=mode, low=low) == (
        f"mode={mode} with low={low}: mask needs a lower bound, truncate has none"
    )
    assert parse(RatioWeights, mode="mask", low=0.5).low == 0.5
    assert parse(RatioWeights).low is None


@pytest.mark.parametrize(
    "compares", [{"weights": {}}, {"rejection": {}}, {"weights": "ratio", "rejection": "rules.py:mine"}]
)
def test_bypass_leaves_nothing_to_compare(compares):
    assert message_of(AlgorithmConfig, rollout_correction={"bypass": True, **compares}) == (
        "rollout_correction: bypass=true makes old_logprobs the rollout's own, so weights and rejection would compare "
        "them with themselves; remove bypass, or weights and rejection"
    )
    correction = parse(AlgorithmConfig, rollout_correction=compares).rollout_correction
    assert correction.compares
    assert not parse(AlgorithmConfig, rollout_correction={"bypass": True}).rollout_correction.compares


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"low": 0.5, "estimator": "k2"}, "low=0.5 with estimator=k2: small values of k2 and k3 are agreement; set "
         "only high"),
        ({"low": 0.5, "estimator": "k3"}, "low=0.5 with estimator=k3: small values of k2 and k3 are agreement; set "
         "only high"),
        ({"low": 3.0}, "low=3.0 is above high=2.0; swap them"),
    ],
)  # fmt: skip
def test_bounds_of_rejection_that_cannot_be_are_refused(tree, message):
    assert message_of(MismatchRejection, **tree) == message


def test_bounds_of_weights_are_in_order():
    assert message_of(RatioWeights, mode="mask", low=3) == "low=3.0 is above high=2.0; swap them"
    assert parse(MismatchRejection, low=0.5).low == 0.5
    assert parse(MismatchRejection, low=2, high=2).high == 2


def test_without_a_name_the_built_in_functions_are_meant():
    correction = parse(RolloutCorrectionConfig, weights={"high": 3}, rejection={})
    assert correction.weights == RatioWeights(high=3)
    assert correction.rejection == MismatchRejection()
    assert parse(RolloutCorrectionConfig, weights=None).weights is None
    assert message_of(RolloutCorrectionConfig, weights={"name": "custom", "function": "a:b", "high": 3}) == (
        "weights.high: name=custom has no such key; it has function, parameters"
    )
