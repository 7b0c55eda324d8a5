"""An environment that calls the tools a policy asks for."""

import asyncio
import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Self

from pydantic import ValidationError, validate_call

from shardwise.config import error_text
from shardwise.environments.environment import Messages
from shardwise.environments.timed_calls import USER_ERRORS, Deadline, call_in_time, is_coroutine
from shardwise.environments.tool_calls import FORMATS, ToolCall, Tools, parameter_schemas
from shardwise.types import Example


class ToolEnvironment:
    """Answers a turn that calls tools with what they return; a turn that calls none is the final answer and ends the
    episode.

    All calls of a turn run at the same time. A call that cannot be read, names no known tool, does not fit the tool's
    signature, raises or takes too long is answered with what is wrong, so that the policy can do better; the episode
    does not fail. Calls of the last turn are not made, because nobody would read what they return.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        *,
        call_format: str,
        max_turns: int,
        tool_timeout_seconds: float,
        max_calls_per_turn: int,
        max_result_chars: int,
        schemas: Tools = (),
    ) -> None:
        """
        Args:
            functions: name of a tool -> function, as `checked` returns it.
            call_format: one of tool_calls.FORMATS.
            max_turns: turns of the policy in one episode.
            tool_timeout_seconds: time limit of one call.
            max_calls_per_turn: further calls are answered with an error.
            max_result_chars: longer results are cut off.
            schemas: the functions' schemas. An `enum` of a parameter allows only its values, and the format qwen needs
                the types to tell text from JSON.
        """
        self._functions = functions
        self._offered = set(functions)
        self._read = FORMATS[call_format]
        self._schemas = schemas
        self._parameters = parameter_schemas(schemas)
        self._turns_left = max_turns
        self._seconds = tool_timeout_seconds
        self._max_calls = max_calls_per_turn
        self._max_chars = max_result_chars
        self._num_calls = self._num_errors = 0

    def reset(self, example: Example) -> None:
        """Offers the tools that the row names, or all if it names none."""
        self._offered = set(self._functions if example.tools is None else example.tools)

    async def step(self, response: str) -> Messages | None:
        """Makes the calls of a turn; returns one message of role tool for each, or None if there are none."""
        self._turns_left -= 1
        num_made, why_not = self._max_calls, f"too many calls in one turn, at most {self._max_calls}"
        if self._turns_left == 0:
            num_made, why_not = 0, "this is the last turn, so nobody would read the answer"
        calls = [
            call if number < num_made else replace(call, error=why_not)
            for number, call in enumerate(self._read(response, self._schemas))
        ]
        # What a call raises is its result, even if it cancels its task; a cancellation of the step is raised here.
        results = await asyncio.gather(*map(self._call, calls), return_exceptions=True)
        self._num_calls += len(calls)
        messages = [
            {"role": "tool", "name": call.name, "content": self._answer(call, result)}
            for call, result in zip(calls, results, strict=True)
        ]
        return messages or None

    def reward(self) -> dict[str, float]:
        """Returns no score of its own, because reward functions judge the answer; counts calls and errors."""
        return {"score": 0.0, "tool_calls": self._num_calls, "tool_errors": self._num_errors}

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    def _answer(self, call: ToolCall, result: str | BaseException) -> str:
        if isinstance(result, BaseException):
            self._num_errors += 1
            result = f"error: {result if isinstance(result, _CallError) else _CallError.of(call, result)}"
        return result if len(result) <= self._max_chars else f"{result[: self._max_chars]}..."

    async def _call(self, call: ToolCall) -> str:
        if call.error is not None:
            raise _CallError(call.error)
        if not self._offered:
            raise _CallError("there are no tools")
        if call.name not in self._offered:
            nearest = difflib.get_close_matches(call.name, self._offered, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"the tools are {', '.join(sorted(self._offered))}"
            raise _CallError(f"there is no tool {call.name!r}; {hint}")
        self._require_choices(call)
        try:
            function = partial(self._functions[call.name], **call.arguments)
            return str(await call_in_time(function, Deadline(self._seconds)))
        except WrongArguments as error:
            raise _CallError(f"{call.name}: {error}") from None
        except USER_ERRORS as error:
            raise _CallError.of(call, error) from None

    def _require_choices(self, call: ToolCall) -> None:
        """Raises _CallError if an argument, or an item of a list argument, is not one of the schema's enum values."""
        for name, value in call.arguments.items():
            match self._parameters.get((call.name, name)):
                case {"enum": list(choices)} if value is not None:  # the type hint decides whether it may be None
                    if any(item not in choices for item in (value if isinstance(value, list) else [value])):
                        raise _CallError(f"{call.name}: {name}: Input should be one of {json.dumps(choices)}")


class WrongArguments(Exception):
    """The arguments of a call do not fit the tool; the message is about the first that does not."""


def checked(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a tool so that its arguments are checked against its type hints.

    Args:
        tool: a plain function, or a coroutine function.
    Returns:
        A function that takes the same arguments, each by its name, and is a coroutine function if the tool is one. It
        raises WrongArguments if they do not fit; any other exception is the tool's.
    Raises:
        Exception: an exception of pydantic's, for type hints that nothing can be checked against.
    """

    @wraps(tool)
    def arguments(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    fitting = validate_call(arguments)

    def call(**given: Any) -> Any:
        try:
            args, kwargs = fitting(**given)
        except ValidationError as error:
            first = error.errors()[0]
            raise WrongArguments(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        return tool(*args, **kwargs)

    async def call_coroutine(**given: Any) -> Any:
        return await call(**given)

    return call_coroutine if is_coroutine(tool) else call


class _CallError(Exception):
    """A call went wrong; the message is what the policy is told."""

    @classmethod
    def of(cls, call: ToolCall, error: BaseException) -> Self:
        """Describes the exception that the tool raised."""
        text = error_text(error)
        return cls(f"{call.name}: {type(error).__name__}{f': {text}' if text else ''}")
