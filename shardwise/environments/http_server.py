"""A small HTTP server for programs on the same machine that hold a token: JSON in, JSON or events out."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from shardwise.environments.chat_format import ApiError
from shardwise.environments.loop_thread import LoopThread

HOST = "127.0.0.1"
_MAX_HEAD_BYTES = 1 << 16
_BACKLOG = 4096
"""Connections that may wait to be accepted: all agents of a batch may connect at the same moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request whose token has been checked."""

    method: str
    path: str
    """The path without the query."""
    token: str
    body: Any
    """The parsed JSON; None if the body is empty."""


Events = Iterable[dict[str, Any]]
Answer = Callable[[HttpRequest], Awaitable[dict[str, Any] | Events]]
"""Answers a request with one object, or with several as server-sent events. Raises ApiError."""


class HttpServer:
    """Serves from its own thread, on the loopback interface only, one request per connection.

    Nothing of a body is kept before its token is checked. However slowly a client writes or reads, its connection ends
    at the deadline, which covers a whole request or a whole answer: single bytes do not extend it.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        is_known: Callable[[str], bool],
        max_body_bytes: int = 1 << 24,
        timeout_seconds: float = 30.0,
    ) -> None:
        """
        Args:
            is_known: whether a token may make requests.
            timeout_seconds: time for a client to send its request, and again to read its answer.
        """
        self._answer, self._is_known = answer, is_known
        self._max_body_bytes, self._timeout_seconds = max_body_bytes, timeout_seconds
        self._thread = LoopThread("endpoint")
        self._server = self._thread.start(self._listen()).result()
        self.port: int = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stops serving."""
        self._thread.loop.call_soon_threadsafe(self._server.close)
        self._thread.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, HOST, 0, limit=_MAX_HEAD_BYTES, backlog=_BACKLOG)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            status, content_type, body = await self._reply(reader, writer)
            async with asyncio.timeout(self._timeout_seconds):
                head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
                await writer.drain()
                if status >= 400:
                    await _outlast(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):  # the client is gone or stuck, or the server closes
            writer.transport.abort()
        finally:
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, str, bytes]:
        """Returns status, content type and body of the answer."""
        try:
            answered = await self._answer(await self._read(reader, writer))
        except ApiError as error:
            return error.status, "application/json", json.dumps(error.body).encode()
        except (OSError, TimeoutError):
            raise
        except Exception as error:  # fails this one request, and its client is told
            problem = ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")
            return problem.status, "application/json", json.dumps(problem.body).encode()
        if isinstance(answered, dict):
            return 200, "application/json", json.dumps(answered).encode()
        events = [*map(json.dumps, answered), "[DONE]"]
        return 200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HttpRequest:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._read_parts(reader, writer)
        except TimeoutError:
            raise ApiError(408, f"no whole request within {self._timeout_seconds:g} s", code="timeout") from None

    async def _read_parts(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HttpRequest:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.LimitOverrunError:
            raise ApiError(431, f"the head of the request is larger than {_MAX_HEAD_BYTES} bytes") from None
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("the client went before it had asked") from None
        first, *lines = head.split("\r\n")
        words = first.split(" ")
        if len(words) != 3:
            raise ApiError(400, "this is no HTTP request")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if not self._is_known(token if scheme.lower() == "bearer" else ""):
            raise ApiError(
                401,
                "no episode that is being played has this API key; every episode has a key of its own "
                "(endpoint.api_key), which ends with it",
                code="invalid_api_key",
            )
        length = self._body_bytes(headers)
        if headers.get("expect", "").lower() == "100-continue" and words[2] != "HTTP/1.0":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # to a client that waits for it, as curl does
        body = await _read_json(reader, length)
        return HttpRequest(method=words[0], path=words[1].partition("?")[0], token=token, body=body)

    def _body_bytes(self, headers: dict[str, str]) -> int:
        """Returns the body's size. Raises ApiError if the head does not tell it, or it is too large."""
        if "transfer-encoding" in headers:
            raise ApiError(411, "the body has no Content-Length; send it in one piece")
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 16):
            raise ApiError(400, f"Content-Length is {length[:40]!r}, expected a number")
        if int(length) > self._max_body_bytes:
            raise ApiError(
                413, f"the body has {length} bytes, at most {self._max_body_bytes} are read", code="too_large"
            )
        return int(length)


async def _read_json(reader: asyncio.StreamReader, num_bytes: int) -> Any:
    try:
        written = await reader.readexactly(num_bytes)
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the client went before it had asked") from None
    try:
        return json.loads(written) if written else None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


async def _outlast(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads on until the client has gone: it may still be sending the refused request, and a client that is cut off
    while sending does not read the answer."""
    writer.write_eof()
    while await reader.read(_MAX_HEAD_BYTES):
        pass
