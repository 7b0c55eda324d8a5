"""What preference training, reward models and distillation add."""

import pytest

from shardwise.config import BradleyTerry, ConfigError, DistillationConfig
from shardwise.config.base import groups_of, tag_of
from shardwise.config.preference import REFERENCE_FREE, Dpo, Ipo, JensenShannon, Kto, Orpo, Simpo
from shardwise.config.recipes import PreferenceConfig


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (Dpo, "beta", 0),
        (Dpo, "label_smoothing", 0.5),
        (Dpo, "label_smoothing", -0.1),
        (Ipo, "beta", 0),
        (Simpo, "beta", -1),
        (Simpo, "gamma", -0.5),
        (Orpo, "beta", 0),
        (Kto, "beta", 0),
        (Kto, "desirable_weight", -1),
        (Kto, "undesirable_weight", -1),
        (BradleyTerry, "center_coef", -0.1),
        (JensenShannon, "beta", 0),
        (JensenShannon, "beta", 1),
        (DistillationConfig, "temperature", 0),
        (DistillationConfig, "temperature", 1e-46),
        (DistillationConfig, "cross_entropy_coef", -1),
    ],
)
def test_value_out_of_range_is_refused(cls, key, value):
    with pytest.raises(ConfigError, match=rf"^test: {key}={value!r}: input should be "):
        cls.parse({key: value}, origin="test")


def test_losses_without_a_reference_are_losses():
    names = {tag_of(choice)[1] for choice in groups_of(PreferenceConfig.model_fields["loss"].annotation)}
    assert names - REFERENCE_FREE == {"dpo", "ipo", "kto", "custom"}
    assert names > REFERENCE_FREE


def test_keys_of_a_divergence_belong_to_it():
    assert DistillationConfig(divergence={"name": "jensen_shannon", "beta": 0.25}).divergence.beta == 0.25
    with pytest.raises(ConfigError) as error:
        DistillationConfig.parse({"divergence": {"beta": 0.25}}, origin="test")
    assert str(error.value) == "test: divergence.beta: name=forward_kl has no such key; it has none"
