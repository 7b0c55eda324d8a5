"""Reads tool calls from the text of a model, in the formats that model families are trained to write."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)\s*>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)\s*>\n?(.*?)\n?</parameter>", re.DOTALL)
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
    others as text; values of parameters that `tools` declare as strings are always text.

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
        call = json.loads(block)
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
        if "<parameter=" in _PARAMETER.sub("", body):
            yield ToolCall(error=f"the call of {name} ends inside a parameter, without </parameter>")
            continue
        given = _PARAMETER.findall(body)
        yield ToolCall(name=name, arguments={key: _value(text, parameters.get((name, key))) for key, text in given})


def _value(text: str, schema: Any) -> Any:
    match schema:
        case {"type": "string", "nullable": True} if text == "null":
            return None
        case {"type": "string"}:
            return text
    try:
        return json.loads(text)
    except _UNREADABLE:
        return text
