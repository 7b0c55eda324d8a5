import pytest

from shardwise.config import ConfigError, EnvironmentConfig
from shardwise.recipes.environment import load_environment

NUMBER = 9


class Whole:
    def __init__(self, *, chances=1): ...

    def reset(self, example): ...

    def step(self, response): ...

    def reward(self): ...

    def close(self): ...


class Half:
    def reset(self, example): ...

    def step(self, response): ...

    def reward(self): ...


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("Half", {}, "has no method close; expected a class with reset"),
        ("Whoel", {}, "did you mean Whole"),
        ("Whole", {"chance": 3}, r"cannot be made with the parameters given \(chance\): got an unexpected keyword"),
        ("NUMBER", {}, "NUMBER is a int, expected a class with reset"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(name, parameters, message):
    config = EnvironmentConfig(path=f"{__file__}:{name}", parameters=parameters)
    with pytest.raises(ConfigError, match=rf"^rollout\.environment\.path=.*{message}"):
        load_environment(config)


def test_an_environment_is_found_with_and_without_parameters():
    for parameters in ({}, {"chances": 2}):
        assert load_environment(EnvironmentConfig(path=f"{__file__}:Whole", parameters=parameters)).__name__ == "Whole"
