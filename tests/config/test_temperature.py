import pytest

from shardwise.config import ConfigError, RolloutConfig


@pytest.mark.parametrize("engine", ["embedded", "vllm", "sglang"])
def test_every_engine_has_the_temperatures_that_float32_and_all_engines_hold(engine):
    for temperature, message in (
        (1e-46, r"temperature=1e-46: input should be greater than or equal to 0\.000001"),  # 0 in float32
        (1e-40, r"temperature=1e-40: input should be greater than or equal to 0\.000001"),  # overflows when divided by
        (9e-7, r"temperature=9e-07: input should be greater than or equal to 0\.000001"),
        (1e39, r"temperature=1e\+39: input should be less than or equal to 1000000"),  # infinite in float32
    ):
        with pytest.raises(ConfigError, match=message):
            RolloutConfig.parse({"engine": engine, "temperature": temperature}, origin="test")
    assert RolloutConfig(temperature=1e-6).temperature == 1e-6
