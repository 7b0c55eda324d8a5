"""The messages of a conversation, as chat templates take them."""

import json
from typing import Any

from shardwise.config import DataError
from shardwise.data.sources import describe_type, preview, without_nulls

Message = dict[str, Any]
"""`{"role": "user", "content": "2+3="}`, or with a list of parts for a content; further keys go to the chat template as
they are."""
ToolSchema = dict[str, Any]
"""A function as chat templates take it: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""


def prompt_messages(
    prompt: str | list[Message], system_prompt: str | None, origin: str, *, may_have_parts: bool = False
) -> list[Message]:
    """Returns a prompt as messages: text becomes one user message; the system prompt goes first if they have none.

    Args:
        may_have_parts: as for `checked_messages`.
    Raises:
        DataError: an empty prompt, or bad messages.
    """
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = checked_messages(prompt, origin, may_have_parts=may_have_parts)
    require_content(messages, origin)
    return with_system_prompt(messages, system_prompt)


def with_system_prompt(messages: list[Message], system_prompt: str | None) -> list[Message]:
    """Returns the messages, with the system prompt (if given) put first where they have none of their own."""
    if system_prompt is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def checked_messages(messages: Any, origin: str, *, may_have_parts: bool = False) -> list[Message]:
    """Returns the messages without null keys and with the arguments of tool calls as objects, as templates take them.

    Args:
        may_have_parts: whether a content may also be a list of parts, whatever they are.
    Raises:
        DataError: not a list of objects with a role and a content that are strings; names the message. Only a message
            with tool calls needs no content, which is then empty.
    """
    if not isinstance(messages, list) or not messages:
        what = "an empty list" if messages == [] else describe_type(messages)
        raise DataError(f"{origin}: the messages are {what}, expected a list of {{role, content}}: {preview(messages)}")
    checked = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise DataError(
                f"{origin}: message {number} is {describe_type(message)}, expected {{role, content}}: "
                f"{preview(message)}"
            )
        if message.get("tool_calls"):
            message = _with_tool_calls(message, f"{origin}: message {number}")
        for key in ("role", "content"):
            if key not in message:
                raise DataError(f'{origin}: message {number} has no "{key}": {preview(message)}')
            if not (isinstance(message[key], str) or (may_have_parts and _has_parts(message, key))):
                raise DataError(
                    f'{origin}: "{key}" of message {number} is {describe_type(message[key])}, expected a string: '
                    f"{preview(message[key])}"
                )
        # Parquet gives every message the keys of all of them, null where it had none; templates test for presence.
        found = {key: value for key, value in message.items() if value is not None}
        checked.append(found | {"content": without_nulls(found["content"])} if may_have_parts else found)
    return checked


def require_content(messages: list[Message], origin: str) -> None:
    """Raises DataError: the messages of a prompt say nothing."""
    if not any(_says_something(message["content"]) for message in messages):
        raise DataError(f"{origin}: the prompt is empty; fill it in or remove it")


def _says_something(content: Any) -> bool:
    match content:
        case str(words) | {"type": "text", "text": str(words)}:
            return bool(words.strip())
        case list(parts):
            return any(map(_says_something, parts))
    return True


def _has_parts(message: Message, key: str) -> bool:
    return key == "content" and isinstance(message[key], list)


def _with_tool_calls(message: Message, place: str) -> Message:
    calls, content = message["tool_calls"], message.get("content")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{place} has tool_calls that are no list of objects: {preview(calls)}")
    calls = [_with_arguments(without_nulls(call), place) for call in calls]
    return {**message, "content": "" if content is None else content, "tool_calls": calls}


def _with_arguments(call: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object; OpenAI's format has them as a string of JSON."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(written := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise DataError(f"{place} calls a tool with arguments that are no JSON object: {preview(written)}; fix the row")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function
