"""What answers the policy between its turns."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from shardwise.config.base import Arguments, Choice, Deadline, PathText

CallFormat = Literal["hermes", "qwen"]


class _Environment(Choice):
    tag: ClassVar[str] = "type"

    max_turns: PositiveInt = 8
    """The most turns of the policy in one completion."""
    timeout_seconds: Deadline = 60.0
    """How long one call of a method of the environment may take; a longer one is a failure of its completion. An agent
    has this long from one turn of the policy to its next request, or to its end."""
    max_concurrent_calls: PositiveInt = 64
    """Environments that are called at the same time, or agents that run at the same time."""


class CustomEnvironment(_Environment):
    """A class of your own."""

    import_key: ClassVar[str] = "path"
    type: Literal["custom"] = "custom"
    """custom: a class of your own, also where the group has no type; tools: functions that the policy may call; agent:
    a program that asks the policy through an OpenAI-compatible endpoint."""
    path: PathText
    """`path/to/file.py:Class` or `package.module:Class` with reset(example), step(response), reward() and close()
    (docs/environments.md); every completion gets an instance of its own."""
    parameters: Arguments = Field(default_factory=dict)
    """Keyword arguments of every instance."""


class ToolsEnvironment(_Environment):
    """Functions that the policy may call; a turn that calls none is its answer."""

    type: Literal["tools"] = "tools"
    """tools: functions that the policy may call."""
    functions: Annotated[list[PathText], Field(min_length=1)]
    """Import paths, `path/to/file.py:name` or `package.module:name`. Type hints and a docstring with Args describe the
    functions to the policy, through the chat template. A row may offer only some of them (data.tools_column)."""
    call_format: CallFormat = "hermes"
    """How the policy writes a call: hermes (Hermes, Qwen2.5, Qwen3) or qwen (Qwen3-Coder)."""
    tool_timeout_seconds: Deadline = 30.0
    """How long one call may take; the policy is told of a longer one. All calls of a turn run at the same time."""
    max_calls_per_turn: PositiveInt = 16
    """The most calls in one turn; further ones are not made, and the policy is told that they were too many."""
    max_result_chars: PositiveInt = 4096
    """The most characters of what a call returns; the rest is cut off."""

    @model_validator(mode="after")
    def _calls_fit_into_a_step(self) -> Self:
        if self.tool_timeout_seconds >= self.timeout_seconds:
            raise ValueError(
                f"tool_timeout_seconds={self.tool_timeout_seconds:g} must be below timeout_seconds="
                f"{self.timeout_seconds:g}, or a slow tool would be a failure of the whole completion"
            )
        if self.max_turns == 1:
            raise ValueError(
                "max_turns=1 leaves no turn for calls, for those of the last one are not made; give 2 or more"
            )
        return self


class AgentEnvironment(_Environment):
    """A function that plays an episode by itself: it asks the policy for its turns through an OpenAI-compatible
    endpoint."""

    type: Literal["agent"] = "agent"
    """agent: a program that asks the policy through an OpenAI-compatible endpoint."""
    path: PathText
    """`path/to/file.py:name` or `package.module:name`, a function or a coroutine function, called once for every
    completion as function(example, endpoint) (docs/environments.md); returns the reward, a number or a dict with
    "score"."""
    parameters: Arguments = Field(default_factory=dict)
    """Further keyword arguments of every call."""
    call_format: CallFormat = "hermes"
    """How the policy writes a call of one of the tools in a request: hermes (Hermes, Qwen2.5, Qwen3) or qwen
    (Qwen3-Coder)."""
    max_wait_seconds: Deadline = 0.1
    """Requests are generated together as soon as every running agent waits for one, or the first of them has waited
    this long. Random draws do not depend on it, but rounding does, as batches differ."""


def _as_group(given: Any) -> Any:
    if isinstance(given, str):
        return {"type": "custom", "path": given}
    return {"type": "custom", **given} if isinstance(given, dict) else given


EnvironmentConfig = Annotated[
    CustomEnvironment | ToolsEnvironment | AgentEnvironment, Field(discriminator="type"), BeforeValidator(_as_group)
]
