"""How the KL divergence is estimated, and how its weight moves."""

from typing import get_args

from shardwise.algorithms.kl import KLEstimator
from shardwise.config import AlgorithmConfig
from shardwise.config.base import groups_of, tag_of


def test_config_and_algorithms_know_the_same_estimators():
    """k2+ is k2, so the config has no second name for it."""
    names = {tag_of(choice)[1] for choice in groups_of(AlgorithmConfig.model_fields["kl_estimator"].annotation)}
    assert (names - {"custom"}) | {"k2+"} == set(get_args(KLEstimator))
