"""An environment that calls the tools a policy asks for."""

import asyncio
import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from shardwise.config import error_text
from shardwise.rollout.environment import Messages
from shardwise.rollout.timed_calls import USER_ERRORS, Deadline, call_in_time
from shardwise.rollout.tool_calls import FORMATS, ToolCall, Tools
from shardwise.types import Example


class ToolEnvironment:
    """Answers a turn that calls tools with what they return; a turn that calls none is the answer, and the end.

    All calls of a turn run at the same time. A call that cannot be read, names no tool, does not fit its signature,
    raises or takes too long is answered with what is wrong, so that the policy can do better: it is no failure of the
    episode.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        *,
        call_format: str,
        tool_timeout_seconds: float,
        max_calls_per_turn: int,
        max_result_chars: int,
        schemas: Tools = (),
    ) -> None:
        """
        Args:
            functions: by the name they are called by; plain functions or coroutines.
            call_format: one of tool_calls.FORMATS.
            tool_timeout_seconds: of one call.
            max_calls_per_turn: further ones are answered with an error.
            max_result_chars: what is beyond is cut off.
            schemas: of the functions; the format qwen needs them to tell text from JSON.
        """
        self._functions = functions
        self._offered = set(functions)
        self._read = FORMATS[call_format]
        self._schemas = schemas
        self._seconds = tool_timeout_seconds
        self._max_calls = max_calls_per_turn
        self._max_chars = max_result_chars
        self._num_calls = self._num_errors = 0

    def reset(self, example: Example) -> None:
        """Offers the tools of the row, or all where it names none."""
        self._offered = set(self._functions if example.tools is None else example.tools)

    async def step(self, response: str) -> Messages | None:
        """One message of role tool for each call."""
        too_many = f"too many calls in one turn, at most {self._max_calls}"
        calls = [
            call if number < self._max_calls else replace(call, error=too_many)
            for number, call in enumerate(self._read(response, self._schemas))
        ]
        results = await asyncio.gather(*map(self._answer, calls))
        self._num_calls += len(calls)
        messages = [
            {"role": "tool", "name": call.name, "content": result} for call, result in zip(calls, results, strict=True)
        ]
        return messages or None

    def reward(self) -> dict[str, float]:
        """No score of its own: reward functions judge the answer."""
        return {"score": 0.0, "tool_calls": self._num_calls, "tool_errors": self._num_errors}

    def close(self) -> None:
        """There is nothing to release."""

    async def _answer(self, call: ToolCall) -> str:
        try:
            result = await self._call(call)
        except _CallError as error:
            self._num_errors += 1
            result = f"error: {error}"
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
        try:
            function = partial(self._functions[call.name], **call.arguments)
            return str(await call_in_time(function, Deadline(self._seconds)))
        except ValidationError as error:
            raise _CallError(f"{call.name}: {_first_problem(error)}") from None
        except USER_ERRORS as error:
            raise _CallError(f"{call.name}: {type(error).__name__}: {error_text(error)}") from None


class _CallError(Exception):
    """What the policy is told about a call that went wrong."""


def _first_problem(error: ValidationError) -> str:
    """Of arguments that do not fit the function's signature."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
