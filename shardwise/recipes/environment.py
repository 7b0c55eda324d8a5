"""Finds what answers the policy: an environment by its import path, or tools."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import validate_call

from shardwise.config import ConfigError, CustomEnvironment, EnvironmentConfig, ToolsEnvironment
from shardwise.rewards import load_function

METHODS = ("reset", "step", "reward", "close")
TOOLS = "rollout.environment.functions"


def load_environment(config: EnvironmentConfig) -> Callable[[], Any]:
    """What makes an environment for a completion.

    Raises:
        ConfigError: a class or function cannot be imported, a class lacks a method or does not take its parameters, a
            function does not say how it is called.
    """
    match config:
        case CustomEnvironment():
            return _load_class(config)
        case ToolsEnvironment():
            from shardwise.rollout import ToolEnvironment  # preflight needs no rollout engine

            return partial(
                ToolEnvironment,
                {name: validate_call(tool) for name, tool in load_tools(config).items()},
                call_format=config.call_format,
                tool_timeout_seconds=config.tool_timeout_seconds,
                max_result_chars=config.max_result_chars,
            )


def check_environment(config: EnvironmentConfig) -> None:
    """Raises ConfigError if an environment cannot be made, or its tools cannot be described to a policy."""
    match config:
        case CustomEnvironment():
            _load_class(config)
        case ToolsEnvironment():
            tool_schemas(config)


def load_tools(config: EnvironmentConfig | None) -> dict[str, Callable[..., Any]]:
    """The functions that a policy may call, by name; none where there are no tools."""
    if not isinstance(config, ToolsEnvironment):
        return {}
    tools: dict[str, Callable[..., Any]] = {}
    for spec in config.functions:
        tool = load_function(spec, key=TOOLS, expected="a function")
        name = spec.rpartition(":")[2]
        if name in tools:
            raise ConfigError(f"{TOOLS} has two functions called {name}, which the policy could not tell apart")
        tools[name] = tool
    return tools


def tool_schemas(config: EnvironmentConfig | None) -> dict[str, dict[str, Any]]:
    """What a chat template is told of the tools, by name.

    Raises:
        ConfigError: a function without type hints, or without a docstring that describes its arguments.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    schemas = {}
    for name, tool in load_tools(config).items():
        try:
            schemas[name] = get_json_schema(tool)
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ConfigError(
                f"{TOOLS}: {name} does not say how it is called ({' '.join(str(error).split())}); give it type hints "
                "and a docstring with an Args: section"
            ) from None
        schemas[name]["function"]["name"] = name  # which need not be what the function calls itself
    return schemas


def _load_class(config: CustomEnvironment) -> Callable[[], Any]:
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
    return partial(found, **config.parameters)
