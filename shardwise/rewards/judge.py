"""An LLM judge: completions graded by a language model behind an OpenAI-compatible /chat/completions endpoint."""

import http.client
import json
import math
import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from urllib.parse import urlsplit

from shardwise.config import ConfigError, JudgeReward
from shardwise.rewards.base import Answer, RewardJob
from shardwise.rewards.user_code import one_line

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
"""Pauses before retries are drawn from 0 to first x 2^attempt, at most the longest; a server's Retry-After counts up to
the longest too."""
RETRIED_STATUSES = frozenset({408, 429, *range(500, 600)})
_READ_BYTES = 1 << 16


class RetryableError(Exception):
    """A failure that may not recur when the request is repeated."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EndpointError(RetryableError):
    """A failure of the endpoint or the way to it, not of the request."""


class RefusedError(Exception):
    """A failure that would recur when the request is repeated."""


class Judge:
    """Asks the endpoint from a few threads; rate, concurrency, time and size are bounded by the config.

    Redirects are not followed and proxy variables not read: the key goes to base_url and nowhere else.
    """

    def __init__(self, config: JudgeReward) -> None:
        """Reads the API key; connects to nothing.

        Raises:
            ConfigError: api_key_env names a variable that is not set.
        """
        key = os.environ.get(config.api_key_env, "").strip() if config.api_key_env else ""
        # http.client would show a key that is no header value in its error.
        if config.api_key_env and not (key and key.isascii() and key.isprintable()):
            raise ConfigError(
                f"reward.functions: {config.name}: api_key_env={config.api_key_env}, but that environment variable is "
                "not set, or holds no key of plain characters; export it, or set api_key_env=null for an endpoint "
                "without keys"
            )
        self.name = config.name
        self._config = config
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._bucket = TokenBucket(config.requests_per_second)
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(config.max_concurrent_requests, thread_name_prefix="judge")
        self._open: set[socket.socket] = set()

    def close(self) -> None:
        """Cuts off requests that are under way and waits for the threads."""
        self._closed.set()
        for sock in list(self._open):
            _break_off(sock)
        self._threads.shutdown(cancel_futures=True)

    def score(self, jobs: Sequence[RewardJob]) -> Iterator[tuple[int, Answer]]:
        """Sends the requests at once; the iterator gives (index of the job, answer) as they arrive."""
        places = {self._threads.submit(self._judge, job): place for place, job in enumerate(jobs)}

        def answers() -> Iterator[tuple[int, Answer]]:
            for future in as_completed(places):
                yield places[future], future.result()

        return answers()

    def _judge(self, job: RewardJob) -> Answer:
        """Judges one completion, with retries."""
        config = self._config
        for attempt in range(config.max_retries + 1):
            if not self._pause(self._bucket.reserve()):
                return Answer(failure="the run ended")
            try:
                return self._read_answer(self._request(job))
            except RefusedError as error:
                return Answer(failure=str(error))
            except RetryableError as error:
                reason, may_pass = str(error), isinstance(error, EndpointError)
                if attempt < config.max_retries and not self._pause(retry_pause(attempt, error.retry_after_seconds)):
                    break
        return Answer(failure=f"{reason} ({attempt + 1} attempts)", may_pass=may_pass)

    def _request(self, job: RewardJob) -> bytes:
        """Sends one request and returns the body of the answer.

        Raises:
            EndpointError: a timeout, a broken connection, a status worth a retry.
            RefusedError: another status, or too large a body.
        """
        config = self._config
        url = urlsplit(config.base_url)
        cls = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = cls(url.netloc, timeout=config.timeout_seconds)
        began = time.monotonic()
        try:
            connection.connect()
        except OSError as error:
            raise EndpointError(f"cannot connect to {url.netloc}: {type(error).__name__}: {error}") from None
        # Kept here because the connection forgets its socket where the server is to close it.
        sock = connection.sock
        # A socket's own timeout begins anew with every byte, so a server that drips bytes would never meet it.
        deadline = threading.Timer(config.timeout_seconds, _break_off, [sock])
        deadline.daemon = True
        self._open.add(sock)
        deadline.start()
        try:
            connection.request("POST", f"{url.path.rstrip('/')}/chat/completions", self._body(job), self._headers)
            response = connection.getresponse()
            body = response.read(config.max_response_bytes + 1)
            if time.monotonic() - began >= config.timeout_seconds:
                raise TimeoutError
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() - began >= config.timeout_seconds:
                raise EndpointError(f"no full answer within {config.timeout_seconds:g} s") from None
            raise EndpointError(f"the connection failed: {type(error).__name__}: {one_line(str(error))}") from None
        finally:
            deadline.cancel()
            self._open.discard(sock)
            connection.close()
        if response.status != 200:
            message = f"the endpoint answered with status {response.status}: {one_line(body.decode(errors='replace'))}"
            if response.status in RETRIED_STATUSES:
                raise EndpointError(message, retry_after_seconds=_seconds(response.getheader("Retry-After")))
            raise RefusedError(message)
        if len(body) > config.max_response_bytes:
            raise RefusedError(f"the answer is larger than max_response_bytes={config.max_response_bytes}")
        return body

    def _body(self, job: RewardJob) -> bytes:
        config = self._config
        request = {
            "model": config.model,
            "messages": [{"role": "user", "content": fill_template(config.prompt_template, job)}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }
        return json.dumps(request).encode()

    def _read_answer(self, body: bytes) -> Answer:
        try:
            text = json.loads(body)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            text = None
        if not isinstance(text, str):
            raise RetryableError(f"no chat completion in the answer: {one_line(body.decode(errors='replace'))}")
        score = parse_score(text, self._config.score_pattern)
        if score is None:
            raise RefusedError(f"no score in the judge's answer (score_pattern): {one_line(text)}")
        return Answer(score=score / self._config.score_scale)

    def _pause(self, seconds: float) -> bool:
        """Sleeps; False where the judge was closed meanwhile."""
        return not self._closed.wait(seconds)


class TokenBucket:
    """Allows at most `rate` requests per second over all threads; unused ones can be made up for within one second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._next = time.monotonic() - max(0.0, 1.0 - 1.0 / rate)

    def reserve(self) -> float:
        """Takes the next free place and returns the seconds to wait for it."""
        with self._lock:
            now = time.monotonic()
            # Allows a burst of one second's requests: the schedule lies at most that far in the past.
            self._next = max(self._next, now - max(0.0, 1.0 - 1.0 / self._rate))
            wait = max(0.0, self._next - now)
            self._next += 1.0 / self._rate
            return wait


def fill_template(template: str, job: RewardJob) -> str:
    """Replaces {prompt}, {completion} and {ground_truth} in one pass: what a completion says is not replaced again."""
    values = {"prompt": job.prompt, "completion": job.solution_str, "ground_truth": str(job.ground_truth)}
    return re.sub(r"\{(prompt|completion|ground_truth)\}", lambda match: values[match[1]], template)


def parse_score(text: str, pattern: str) -> float | None:
    """Returns the number in the first group of the pattern's last match; None where there is no finite one."""
    score = None
    for match in re.finditer(pattern, text):
        with suppress(TypeError, ValueError):
            score = float(match[1].replace("\u2212", "-"))
    return score if score is not None and math.isfinite(score) else None


def retry_pause(attempt: int, retry_after_seconds: float | None) -> float:
    """Returns the seconds to wait: what the server asked for, else a random share of a pause that doubles (full
    jitter), so that clients that failed together do not come back together."""
    if retry_after_seconds is not None:
        return min(retry_after_seconds, LONGEST_PAUSE_SECONDS)
    return random.uniform(0, min(FIRST_PAUSE_SECONDS * 2**attempt, LONGEST_PAUSE_SECONDS))


def _seconds(header: str | None) -> float | None:
    """Reads a Retry-After in seconds; None for its other form, a date: then the growing pauses apply."""
    return float(header) if header is not None and re.fullmatch(r"[0-9]{1,6}", header.strip()) else None


def _break_off(sock: socket.socket) -> None:
    """Makes a thread that reads from the socket see its end."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
