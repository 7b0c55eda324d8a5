"""Finds the environment that answers the policy."""

import inspect
from collections.abc import Callable
from typing import Any

from shardwise.config import ConfigError, EnvironmentConfig
from shardwise.rewards import load_function

METHODS = ("reset", "step", "reward", "close")


def load_environment(config: EnvironmentConfig) -> Callable[..., Any]:
    """The class of an environment.

    Raises:
        ConfigError: it cannot be imported, lacks a method, or does not take its parameters.
    """
    key, expected = "rollout.environment.path", "a class with reset(example), step(response), reward() and close()"
    found = load_function(config.path, key=key, expected=expected)
    absent = [name for name in METHODS if not callable(getattr(found, name, None))]
    if absent:
        raise ConfigError(f"{key}={config.path} has no method {absent[0]}; expected {expected}")
    try:
        inspect.signature(found).bind(**config.parameters)
    except TypeError as error:
        given = ", ".join(config.parameters) or "none"
        raise ConfigError(f"{key}={config.path} cannot be made with the parameters given ({given}): {error}") from None
    return found
