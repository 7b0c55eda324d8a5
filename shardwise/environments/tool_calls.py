"""Reads tool calls from the text of a model, in the formats that model families are trained to write."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
# Reading takes time in proportion to the text, whatever tags it repeats: no name holds a tag, and nothing looks for the
# end of a parameter where there is none.
_FUNCTION = re.compile(r"<function=([^<>\s]+)\s*>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)\s*>\n?(.*?)\n?</parameter>", re.DOTALL)
Tools = Sequence[dict[str, Any]]
"""JSON schemas of functions, as chat templates take them."""

_UNREADABLE = (ValueError, RecursionError)  # not JSON, or, for Python, an integer too long or nesting too deep


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool, or what is wrong with it.

    Example: `ToolCall(name="calculator", arguments={"expression": "2+3"})`, `ToolCall(error="not valid JSON: ...")`
    """

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def hermes_calls(text: str, tools: Tools = ()) -> list[ToolCall]:
    """Returns the calls in a text, in order, as Hermes, Qwen2.5 and Qwen3 write them.

    Example: `<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>`
    """
    return [_hermes_call(block) for block in _BLOCK.findall(text)]


def qwen_calls(text: str, tools: Tools = ()) -> list[ToolCall]:
    """Returns the calls in a text, in order, as Qwen3-Coder writes them. Values that are valid JSON are read as JSON,
    others as text; values of parameters that `tools` declare as strings are always text, but for the null of one that
    may be null.

    Example: `<tool_call><function=calculator><parameter=expression>2+3</parameter></function></tool_call>`
    """
    parameters = parameter_schemas(tools)
    return [call for block in _BLOCK.findall(text) for call in _qwen_calls(block, parameters)]


def parameter_schemas(tools: Tools) -> dict[tuple[str, str], Any]:
    """Returns (name of a tool, name of a parameter) -> schema of the parameter."""
    found: dict[tuple[str, str], Any] = {}
    for tool in tools:
        match tool:
            case {"function": {"name": str(name), "parameters": {"properties": dict(properties)}}}:
                found |= {(name, parameter): schema for parameter, schema in properties.items()}
    return found


FORMATS: Mapping[str, Callable[[str, Tools], list[ToolCall]]] = {"hermes": hermes_calls, "qwen": qwen_calls}
"""Name of a format -> reader: (text of a turn, tools that may be called) -> the calls in the text."""
TAGS: Mapping[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen": ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
}
"""Name of a format -> the tags by which its calls are recognized."""


def _hermes_call(block: str) -> ToolCall:
    try:
        call = _read_json(block)
    except _UNREADABLE as error:
        return ToolCall(error=f"the tool call is not valid JSON: {error}")
    name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(error='the tool call is not of the form {"name": ..., "arguments": {...}}')
    return ToolCall(name=name, arguments=arguments)


def _qwen_calls(block: str, parameters: Mapping[tuple[str, str], Any]) -> Iterator[ToolCall]:
    functions = _FUNCTION.findall(block)
    if not functions:
        yield ToolCall(error="the tool call is not of the form <function=name>...</function>")
    for name, body in functions:
        if body.rfind("<parameter=") > body.rfind("</parameter>") or "<parameter=" in _PARAMETER.sub("", body):
            yield ToolCall(error=f"the call of {name} ends inside a parameter, without </parameter>")
            continue
        given = _PARAMETER.findall(body)
        yield ToolCall(name=name, arguments={key: _value(text, parameters.get((name, key))) for key, text in given})


def _value(text: str, schema: Any) -> Any:
    types = _types(schema)
    if "string" in types and types <= {"string", "null"}:
        return None if text == "null" and "null" in types else text
    try:
        return _read_json(text)
    except _UNREADABLE:
        return text


def _types(schema: Any) -> set[str]:
    """Returns the names of the types that a JSON schema allows; "any" among them where it does not say."""
    match schema:
        case {"type": str(name)}:
            found = {name}
        case {"type": [*names]}:
            found = set(map(str, names))
        case {"anyOf": [*options]} | {"oneOf": [*options]}:
            found = set().union(*map(_types, options))
        case _:
            return {"any"}
    return found | {"null"} if schema.get("nullable") is True else found


def _read_json(text: str) -> Any:
    """Reads JSON. Raises ValueError also for what Python's reader takes beside it and could not be sent as JSON: NaN
    and numbers without end."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(text: str) -> float:
    if math.isfinite(number := float(text)):
        return number
    raise ValueError(f"{text} is no number of JSON")
