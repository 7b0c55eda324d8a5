"""Finds what answers the policy: an environment or an agent by its import path, or tools."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.config import (
    AgentEnvironment,
    ConfigError,
    CustomEnvironment,
    DataError,
    EnvironmentConfig,
    ToolsEnvironment,
    in_one_line,
)
from shardwise.console import warn
from shardwise.data.chat import render_prompt
from shardwise.environments import ToolEnvironment
from shardwise.environments.tool_calls import TAGS
from shardwise.environments.tools import checked
from shardwise.rewards import kind_of_callable, load_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

METHODS: Mapping[str, tuple[str, ...]] = {"reset": ("example",), "step": ("response",), "reward": (), "close": ()}
"""Method of an environment -> arguments that it is called with."""
TOOLS = "rollout.environment.functions"


def load_environment(config: CustomEnvironment | ToolsEnvironment) -> Callable[[], Any]:
    """Returns a function that makes an environment for a completion.

    Raises:
        ConfigError: a class or function cannot be imported, a class does not take its parameters or lacks a method that
            can be called as it will be, or a function does not say how it is called.
    """
    match config:
        case CustomEnvironment():
            return _load_class(config)
        case ToolsEnvironment():
            return partial(
                ToolEnvironment,
                checked_tools(config),
                call_format=config.call_format,
                max_turns=config.max_turns,
                tool_timeout_seconds=config.tool_timeout_seconds,
                max_calls_per_turn=config.max_calls_per_turn,
                max_result_chars=config.max_result_chars,
                schemas=list(tool_schemas(config).values()),
            )


def check_environment(config: EnvironmentConfig) -> None:
    """Raises ConfigError if an environment cannot be made, tools cannot be described to a policy, or an agent cannot be
    called."""
    match config:
        case CustomEnvironment():
            _load_class(config)
        case ToolsEnvironment():
            tool_schemas(config)
            checked_tools(config)
        case AgentEnvironment():
            load_agent(config)


def load_agent(config: AgentEnvironment) -> Callable[..., Any]:
    """Returns the function that plays an episode, given its row and the endpoint.

    Raises:
        ConfigError: it cannot be imported, or does not take what it is called with.
    """
    key, expected = "rollout.environment.path", "a function(example, endpoint) that returns the reward"
    agent = load_function(config.path, key=key, expected=expected)
    if (kind := kind_of_callable(agent)) in ("class", "generator"):
        raise ConfigError(f"{key}={config.path} is a {kind}, expected {expected}")
    try:
        inspect.signature(agent).bind("example", "endpoint", **config.parameters)
    except TypeError as error:
        given = ", ".join(config.parameters) or "none"
        raise ConfigError(
            f"{key}={config.path} cannot be called with example, endpoint and the parameters given ({given}): {error}; "
            f"expected {expected}"
        ) from None
    return partial(agent, **config.parameters)


def load_tools(config: EnvironmentConfig | None) -> dict[str, Callable[..., Any]]:
    """Returns name -> function that the policy may call; empty if there are no tools.

    Raises:
        ConfigError: one cannot be imported, is no plain function or coroutine function, or has parameters that a call
            by keyword cannot give; or two have one name.
    """
    if not isinstance(config, ToolsEnvironment):
        return {}
    tools: dict[str, Callable[..., Any]] = {}
    for spec in config.functions:
        tool = load_function(spec, key=TOOLS, expected="a function")
        name = spec.rpartition(":")[2]
        if name in tools:
            raise ConfigError(f"{TOOLS} has two functions called {name}, which the policy could not tell apart")
        _require_function(name, tool)
        tools[name] = tool
    return tools


def checked_tools(config: ToolsEnvironment) -> dict[str, Callable[..., Any]]:
    """Returns name -> tool, each of which checks its arguments against its type hints.

    Raises:
        ConfigError: arguments cannot be checked against a tool's type hints.
    """
    tools = {}
    for name, tool in load_tools(config).items():
        try:
            tools[name] = checked(tool)
        except Exception as error:
            raise ConfigError(
                f"{TOOLS}: arguments of {name} cannot be checked against its type hints ({_one_line(error)}); "
                "use types that pydantic knows"
            ) from None
    return tools


def tool_schemas(config: EnvironmentConfig | None) -> dict[str, dict[str, Any]]:
    """Returns name -> JSON schema of the tool, for the chat template.

    Raises:
        ConfigError: a function has no type hints, or no docstring that describes its arguments.
    """
    from transformers.utils import get_json_schema

    schemas = {}
    for name, tool in load_tools(config).items():
        try:
            schemas[name] = get_json_schema(tool)
        except Exception as error:  # evaluating its type hints may raise anything
            raise ConfigError(
                f"{TOOLS}: {name} does not say how it is called ({_one_line(error)}); give it type hints "
                "and a docstring with an Args: section"
            ) from None
        schemas[name]["function"]["name"] = name  # the function's own __name__ may differ
    return schemas


def require_tool_tags(config: EnvironmentConfig | None, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Checks that no tag that marks a tool call is a special token, since turns are read without these; for agents too,
    which may offer tools of their own.

    Raises:
        ConfigError: the tokenizer loses a tag of the call format, so that no call would ever be seen.
    """
    if not isinstance(config, ToolsEnvironment | AgentEnvironment):
        return
    for tag in TAGS[config.call_format]:
        token_ids = tokenizer.encode(tag, add_special_tokens=False)
        if tag not in tokenizer.decode(token_ids, skip_special_tokens=True):
            raise ConfigError(
                f"rollout.environment.call_format={config.call_format} marks calls with {tag}, which the tokenizer "
                "drops from decoded text as a special token or cannot write, so no call would be seen; set "
                'model.tokenizer_path to a tokenizer in which it is an ordinary added token ("special": false), or '
                "choose another call_format"
            )


def warn_of_unseen_tools(
    config: EnvironmentConfig | None, tokenizer: "PreTrainedTokenizerBase", system_prompt: str | None
) -> None:
    """Warns if the chat template tells the policy nothing of the tools. A template that cannot render a lone question
    is not judged: rows may have another form."""
    schemas = tool_schemas(config)
    if not schemas:
        return
    render = partial(
        render_prompt, tokenizer, "?", apply_chat_template=True, system_prompt=system_prompt or "?", origin="a question"
    )
    try:
        is_silent = render(tools=list(schemas.values())) == render()
    except DataError:
        return
    if is_silent:
        warn(
            f"the chat template says nothing of {', '.join(schemas)}: unless prompts do, the policy calls what "
            "training has taught it to call; model.chat_template names another template"
        )


def _require_function(name: str, tool: Callable[..., Any]) -> None:
    kind = kind_of_callable(tool)
    if not inspect.isfunction(tool) or kind == "generator":
        what = kind if kind in ("class", "generator") else type(tool).__name__
        raise ConfigError(
            f"{TOOLS}: {name} is a {what}, expected a plain function or a coroutine function; wrap it in one"
        )
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{TOOLS}: {name} has the {parameter.kind.description} parameter {parameter.name}, but a policy gives "
                "every argument by its name; name the parameters, without / and *"
            )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {in_one_line(error)}"


def _load_class(config: CustomEnvironment) -> Callable[[], Any]:
    key, expected = "rollout.environment.path", "a class with reset(example), step(response), reward() and close()"
    found = load_function(config.path, key=key, expected=expected)
    for name, arguments in METHODS.items():
        if problem := _problem_of_method(found, name, arguments):
            raise ConfigError(f"{key}={config.path} {problem}; expected {expected}")
    try:
        inspect.signature(found).bind(**config.parameters)
    except TypeError as error:
        given = ", ".join(config.parameters) or "none"
        raise ConfigError(f"{key}={config.path} cannot be made with the parameters given ({given}): {error}") from None
    return partial(found, **config.parameters)


def _problem_of_method(found: Callable[..., Any], name: str, arguments: tuple[str, ...]) -> str | None:
    """Says why a method of an environment cannot be called as it will be; None if it can."""
    method = getattr(found, name, None)
    if not callable(method):
        return f"has no method {name}"
    if kind_of_callable(method) == "generator":
        return f"has a method {name} that is a generator"
    is_plain = method is inspect.getattr_static(found, name) and hasattr(type(method), "__get__")  # else it is bound
    try:
        with suppress(ValueError):  # a C function has no signature
            inspect.signature(method).bind(*(("self", *arguments) if is_plain else arguments))
    except TypeError as error:
        return f"has a method {name} that cannot be called with {', '.join(arguments) or 'nothing'}: {error}"
    return None
