"""The OpenAI chat-completions format: what a request may contain, and how an answer is written."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from shardwise.environments.tool_calls import FORMATS, Tools
from shardwise.types import GenerateRequest

MODEL = "policy"
"""The name of the only model."""
CONTEXT_EXCEEDED = "context_length_exceeded"
"""The code by which clients know that a conversation has become too long."""

Message = dict[str, Any]

_ROLES = ("system", "user", "assistant", "tool")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
_CREATED = 0
"""Timestamp of every answer; the time of day would make two runs differ."""


class ApiError(Exception):
    """A refusal of a request, with its HTTP status and body."""

    def __init__(self, status: int, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        """
        Args:
            code: tells refusals apart, for programs.
            param: the key of the request that the refusal is about.
        """
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class ChatRequest(BaseModel):
    """The keys that a request may have. How to sample is up to the run, see `require_sampling`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    messages: list[dict[str, Any]]
    model: str
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None

    n: Literal[1] | None = None
    top_logprobs: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    user: Any = None  # these keys are allowed because they change nothing in the answer
    metadata: Any = None
    store: Any = None
    service_tier: Any = None

    @field_validator("n", "top_logprobs", "frequency_penalty", "presence_penalty", mode="before")
    @classmethod
    def _is_number(cls, value: Any) -> Any:
        """Refuses booleans, because Python takes true for 1."""
        if isinstance(value, bool):
            raise PydanticCustomError("number", "Input should be a number")
        return value

    @property
    def token_limit(self) -> int | None:
        """Largest number of tokens of this turn; None: the request sets no limit."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)


def read_request(body: Any) -> ChatRequest:
    """Reads the request from a body.

    Raises:
        ApiError: the body is not of this form, or asks for something that is not offered; says what is.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {preview(body)}; send a JSON object with model and messages")
    # Some clients send all keys they know, null for those that are not set.
    given = {name: value for name, value in body.items() if value is not None}
    try:
        request = ChatRequest.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from None
    if request.model != MODEL:
        raise ApiError(
            404,
            f"there is no model {request.model!r}; the one here is {MODEL!r}",
            code="model_not_found",
            param="model",
        )
    return request


def require_sampling(request: ChatRequest, sampling: GenerateRequest) -> None:
    """Requires that a request does not change how the run samples, though it may repeat it: training needs the run's
    own distribution.

    Raises:
        ApiError: temperature, top_k, top_p, min_p or stop differs from the run's; names both values.
    """
    given = {name: getattr(request, name) for name in ("temperature", "top_k", "top_p", "min_p", "stop")}
    given["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    for name, value in given.items():
        own = getattr(sampling, name)
        if value is not None and value != own:
            raise ApiError(
                400,
                f"{name}={json.dumps(value)}, but this completion is sampled with {name}={json.dumps(own)} "
                f"(rollout.{name}; greedy where the run validates); leave {name} out",
                param=name,
            )


def plain_message(message: Message, number: int) -> Message:
    """Reduces a message to what a chat template reads: text as one string, arguments of calls as objects, no nulls.
    `says_the_same` compares this form.

    Args:
        number: the message's place, counted from 1, for errors.
    Raises:
        ApiError: an unknown role, content that is not text, or a key that nothing would read.
    """
    where = {"param": f"messages[{number - 1}]"}
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in _ROLES:
        raise ApiError(
            400, f"message {number} has the role {role!r}; use {', '.join(_ROLES)}, or developer for system", **where
        )
    unread = [key for key, value in message.items() if key not in _KEYS and value]
    if unread and role != "assistant":  # clients add their own keys to the answers they got
        raise ApiError(400, f"message {number} has the key {unread[0]!r}, which no one would read; remove it", **where)
    plain = {key: message[key] for key in ("name", "tool_call_id") if message.get(key) is not None}
    for key, value in plain.items():
        if not isinstance(value, str):
            raise ApiError(400, f"message {number} has {key}={preview(value)}, expected a string", **where)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise ApiError(400, f"message {number} has tool_calls={preview(calls)}, expected a list of calls", **where)
        plain["tool_calls"] = [_plain_call(call, number) for call in calls]
    return {"role": role, "content": _text(message.get("content"), number), **plain}


def says_the_same(one: Message, other: Message, stop: Sequence[str] = ()) -> bool:
    """Whether two plain messages say the same. Whitespace around the text is ignored, because some frameworks strip it;
    so is the stop string that ended an assistant's turn, because clients are given the text without it."""
    return _without_ends(one, stop) == _without_ends(other, stop)


def _without_ends(message: Message, stop: Sequence[str]) -> Message:
    content = message["content"]
    if message["role"] == "assistant":
        content = content.removesuffix(max(filter(content.endswith, stop), key=len, default=""))
    return {**message, "content": content.strip()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """A turn of the policy, as it is reported to a client."""

    id: str
    message: Message
    """The message in the form of `plain_message`; calls have ids."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_prompt_tokens: int
    decode_tokens: Callable[[], list[str]] = field(repr=False)
    """Returns the sampled tokens, each as text; called for a client that asks for logprobs."""
    logprobs: list[float] = field(repr=False)
    """Logprobs of the tokens, in nats."""


def read_turn(text: str, number: int, *, call_format: str | None, tools: Tools = ()) -> Message:
    """Converts the text of a turn of the policy to a plain message. If any call cannot be read, all of it is text.

    Args:
        number: the turn's number, used in the ids of its calls.
        call_format: one of tool_calls.FORMATS; None: no calls are read.
        tools: the request's.
    """
    calls = [] if call_format is None else FORMATS[call_format](text, tools)
    if not calls or any(call.error is not None for call in calls):
        return {"role": "assistant", "content": text}
    tool_calls = [
        {
            "id": f"call_{number}_{place}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": text.partition("<tool_call>")[0].strip(), "tool_calls": tool_calls}


def completion_body(answer: ChatAnswer, *, logprobs: bool) -> dict[str, Any]:
    """Writes the answer as one response body."""
    return {
        **_head(answer, "chat.completion"),
        "choices": [{"index": 0, "message": _wire_message(answer), **_end(answer, logprobs=logprobs)}],
        "usage": _usage(answer),
    }


def completion_events(answer: ChatAnswer, *, logprobs: bool, usage: bool) -> Iterator[dict[str, Any]]:
    """Writes the answer for a client that asked for a stream; the whole message is one event, since it is all there."""
    head = _head(answer, "chat.completion.chunk")
    delta = _wire_message(answer)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
    yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, **_end(answer, logprobs=logprobs)}]}
    if usage:
        yield {**head, "choices": [], "usage": _usage(answer)}


def model_list() -> dict[str, Any]:
    """Returns the answer to GET /models."""
    return {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "created": _CREATED, "owned_by": "shardwise"}],
    }


def _head(answer: ChatAnswer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": _CREATED, "model": MODEL}


def _end(answer: ChatAnswer, *, logprobs: bool) -> dict[str, Any]:
    if not logprobs:
        return {"finish_reason": answer.finish_reason, "logprobs": None}
    told = [
        {"token": token, "logprob": logprob, "bytes": _bytes_of(token), "top_logprobs": []}
        for token, logprob in zip(answer.decode_tokens(), answer.logprobs, strict=True)
    ]
    return {"finish_reason": answer.finish_reason, "logprobs": {"content": told}}


def _bytes_of(token: str) -> list[int] | None:
    """Returns the UTF-8 bytes of a token; None for a part of a character, which is not text."""
    return None if "\N{REPLACEMENT CHARACTER}" in token else list(token.encode())


def _usage(answer: ChatAnswer) -> dict[str, int]:
    num_sampled = len(answer.logprobs)
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": answer.num_prompt_tokens + num_sampled,
    }


def _wire_message(answer: ChatAnswer) -> Message:
    message = dict(answer.message)
    if "tool_calls" in message:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return message


def _text(content: Any, number: int) -> str:
    parts = [{"type": "text", "text": content or ""}] if content is None or isinstance(content, str) else content
    if not isinstance(parts, list) or not all(map(_is_text, parts)):
        raise ApiError(
            400,
            f"message {number} has a content that is not text: {preview(content)}; the policy reads strings, and parts "
            'of the form {"type": "text", "text": ...}; images are not offered here',
            param=f"messages[{number - 1}]",
        )
    joined = "".join(part["text"] for part in parts)
    return joined.encode("utf-8", "replace").decode()  # half of a surrogate pair is not a character


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _plain_call(call: Any, number: int) -> dict[str, Any]:
    match call:
        case {"id": str(call_id), "function": {"name": str(name), "arguments": str(arguments)}}:
            try:
                read = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                read = None
            if isinstance(read, dict):
                return {"id": call_id, "type": "function", "function": {"name": name, "arguments": read}}
    raise ApiError(
        400,
        f'message {number} has the tool call {preview(call)}, expected {{"id": ..., "type": "function", '
        '"function": {"name": ..., "arguments": "{...}"}}',
        param=f"messages[{number - 1}]",
    )


def preview(value: Any) -> str:
    """Formats a value as one line of JSON, cut off if it is long."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 160 else f"{text[:157]}..."


def _refusal(error: ValidationError) -> ApiError:
    first: Any = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        offered: Sequence[str] = sorted(ChatRequest.model_fields)
        return ApiError(
            400, f"{name} is not offered here; leave it out. What a request may have: {', '.join(offered)}", param=name
        )
    given = "" if first["type"] == "missing" else f"={preview(first['input'])}"
    return ApiError(400, f"{name}{given}: {first['msg']}", param=name)
