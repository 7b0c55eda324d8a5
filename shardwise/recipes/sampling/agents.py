"""Completions made by agents: programs that ask for the policy's turns through an OpenAI-compatible endpoint."""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from shardwise.config import AgentEnvironment, TrainingError
from shardwise.data import longest_token
from shardwise.environments import AgentRunner, Endpoint, HttpServer, chat_format
from shardwise.environments.chat_format import ApiError
from shardwise.environments.http_server import HOST, Events, HttpRequest
from shardwise.recipes.sampling.conversation import Conversation, Limits
from shardwise.recipes.sampling.episodes import Episode, Generate
from shardwise.rewards import Answer, describe_error, read_score
from shardwise.types import Example, GenerateRequest

Agent = Callable[[Example, Endpoint], Any]


@dataclass(slots=True)
class _Session:
    """An agent's episode that is being played, and what the endpoint knows of it."""

    row: Example
    conversation: Conversation
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    cancel: Callable[[], object] | None = None
    """Cancels its agent; None before the agent has started."""
    outcome: Answer | None = None
    """What came of the episode; None while it is played."""
    waiting: GenerateRequest | None = None
    """The request for the turn that its agent waits for; None if it waits for none."""
    since: float = 0.0
    """When its agent began to wait for a turn, or last started or continued to run; as time.monotonic()."""

    @property
    def runs(self) -> bool:
        return self.cancel is not None and self.outcome is None


class Agents:
    """Plays the episodes of a whole batch at the same time. A context manager.

    Three kinds of threads take part: the caller of `play`, which generates; the server's; those that the agents run in.
    One condition guards what they share.
    """

    def __init__(
        self,
        config: AgentEnvironment,
        agent: Agent,
        tokenizer: PreTrainedTokenizerBase,
        generate: Generate,
        *,
        max_prompt_tokens: int,
        media_token_ids: Collection[int] = (),
    ) -> None:
        """Opens the endpoint. `agent` is called once for each completion; no message may bring in `media_token_ids`."""
        self._config = config
        self._agent = agent
        self._tokenizer = tokenizer
        self._generate = generate
        self._limits = Limits(max_prompt_tokens, config.max_turns, longest_token(tokenizer), media_token_ids)
        self._version, self._has_sampled = 0, False
        self._has_refused_keys = False
        self._changed = threading.Condition()
        self._sessions: dict[str, _Session] = {}
        self._runner = AgentRunner()
        self._server = HttpServer(self._answer, is_known=self._is_known)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.close()
        self._runner.close()

    def play(self, examples: Sequence[Example], requests: Sequence[GenerateRequest]) -> list[list[Episode]]:
        """Plays the episodes of every example, as many as its request asks for. Whatever happens, no key works
        afterwards.

        Consumes: requests of agents. Waits for: all agents. Unblocked by: each one's deadline.

        Raises:
            TrainingError: no agent has ever got as far as a turn.
        """
        groups = [self._begin(example, request) for example, request in zip(examples, requests, strict=True)]
        sessions = [session for group in groups for session in group]
        with self._changed:
            self._sessions = {session.key: session for session in sessions}
        try:
            while batch := self._next_batch(sessions):
                self._take_turns(batch)
        finally:
            with self._changed:
                self._sessions = {}
                for session in sessions:
                    self._end(session, Answer(failure="the run ended"))
        self._note_version(sessions)
        return [[_episode(session, self._version) for session in group] for group in groups]

    def _note_version(self, sessions: Sequence[_Session]) -> None:
        """Updates the policy's version, for completions of agents that failed before the first turn. Raises
        TrainingError: no agent has ever got as far as a turn."""
        sampled = [session.conversation.completion for session in sessions if session.conversation.num_turns > 0]
        self._version = max((completion.newest_version for completion in sampled), default=self._version)
        self._has_sampled |= bool(sampled)
        if not self._has_sampled:
            outcome = sessions[0].outcome
            assert outcome is not None
            raise TrainingError(
                f"none of {len(sessions)} agents asked the policy for a turn; the first, for row "
                f"{sessions[0].row.uid}: {outcome.failure}. {self._advice()}"
            )

    def _advice(self) -> str:
        if self._has_refused_keys:
            return "The endpoint refused requests without the key of their episode; give the client endpoint.api_key"
        return f"Fix the agent, rollout.environment.path={self._config.path}"

    def _begin(self, example: Example, request: GenerateRequest) -> list[_Session]:
        conversation = partial(Conversation, self._tokenizer, limits=self._limits, call_format=self._config.call_format)
        return [_Session(example, conversation(one)) for one in request.one_by_one()]

    def _next_batch(self, sessions: Sequence[_Session]) -> list[_Session]:
        """Returns the sessions whose agents wait for a turn, as soon as it is time to generate; none if all ended."""
        with self._changed:
            while True:
                now = time.monotonic()
                self._end_late(sessions, now)
                self._start(sessions, now)
                running = [session for session in sessions if session.runs]
                waiting = [session for session in running if session.waiting is not None]
                first = min((session.since for session in waiting), default=now)
                if len(waiting) == len(running) or now >= first + self._config.max_wait_seconds:
                    return waiting
                self._changed.wait(self._seconds_to_wait(running, now))

    def _seconds_to_wait(self, running: Sequence[_Session], now: float) -> float:
        """Returns the seconds until something has to be done even if nothing changes."""
        limits = {True: self._config.max_wait_seconds, False: self._config.timeout_seconds}
        return max(0.0, min(session.since + limits[session.waiting is not None] for session in running) - now)

    def _end_late(self, sessions: Sequence[_Session], now: float) -> None:
        seconds = self._config.timeout_seconds
        for session in sessions:
            if session.runs and session.waiting is None and now >= session.since + seconds:
                what = f"no request and no end within {seconds:g} s (rollout.environment.timeout_seconds)"
                self._end(session, Answer(failure=f"the agent made {what}"))

    def _start(self, sessions: Sequence[_Session], now: float) -> None:
        num_free = self._config.max_concurrent_calls - sum(session.runs for session in sessions)
        to_begin = [session for session in sessions if session.cancel is None and session.outcome is None]
        for session in to_begin[:num_free]:
            endpoint = Endpoint(
                base_url=f"http://{HOST}:{self._server.port}/v1", api_key=session.key, model=chat_format.MODEL
            )
            session.since = now
            session.cancel = self._runner.start(
                partial(self._agent, deepcopy(session.row), endpoint), partial(self._done, session)
            )

    def _take_turns(self, batch: Sequence[_Session]) -> None:
        requests = [session.waiting for session in batch]
        turns = self._generate([request for request in requests if request is not None])
        with self._changed:
            for session, (turn,) in zip(batch, turns, strict=True):
                if session.outcome is None:  # its agent did not go away meanwhile
                    session.waiting, session.since = None, time.monotonic()
                    session.conversation.take(turn)

    def _done(self, session: _Session, returned: Any) -> None:
        """Ends the session; called from the agent's thread."""
        with self._changed:
            self._end(session, _outcome(session, returned))

    def _end(self, session: _Session, outcome: Answer) -> None:
        """Ends the session with an outcome, unless it has ended already."""
        if session.outcome is not None:
            return
        session.outcome = outcome
        self._sessions.pop(session.key, None)
        session.conversation.close("the episode is over")
        if session.cancel is not None:
            session.cancel()
        self._changed.notify_all()

    def _is_known(self, key: str) -> bool:
        """Returns whether a session has this key; called from the server's thread."""
        with self._changed:
            self._has_refused_keys |= key not in self._sessions
            return key in self._sessions

    async def _answer(self, request: HttpRequest) -> dict[str, Any] | Events:
        """Answers an HTTP request; called from the server's thread."""
        match request.method, request.path:
            case "GET", "/v1/models":
                return chat_format.model_list()
            case "POST", "/v1/chat/completions":
                return await self._complete(request)
        raise ApiError(
            404,
            f"there is no {request.method} {request.path} here; use POST /v1/chat/completions or GET /v1/models",
            code="not_found",
        )

    async def _complete(self, request: HttpRequest) -> dict[str, Any] | Events:
        chat = chat_format.read_request(request.body)
        with self._changed:
            session = self._sessions.get(request.token)
            if session is None:
                raise ApiError(503, "the episode is over", code="episode_over")
            asked = session.conversation.ask(chat)
            if not asked.answer.done() and session.waiting is None:
                session.waiting, session.since = asked.request, time.monotonic()
                self._changed.notify_all()
        # Shielded: a client that goes away does not take the turn with it, and may ask for it again.
        answer = await asyncio.shield(asyncio.wrap_future(asked.answer))
        if not chat.stream:
            return chat_format.completion_body(answer, logprobs=bool(chat.logprobs))
        usage = bool((chat.stream_options or {}).get("include_usage"))
        return chat_format.completion_events(answer, logprobs=bool(chat.logprobs), usage=usage)


def _outcome(session: _Session, returned: Any) -> Answer:
    """Returns the outcome of an episode whose agent has ended."""
    if isinstance(returned, BaseException):
        return Answer(failure=f"the agent failed: {describe_error(returned)}{_after_refusal(session)}")
    if session.conversation.num_turns == 0:
        return Answer(failure="the agent returned without having asked the policy for a turn")
    answer = Answer(**read_score(returned))
    return answer if answer.failure is None else Answer(failure=f"the agent {answer.failure}")


def _after_refusal(session: _Session) -> str:
    """Says what an agent that failed at a limit should do instead; "" if it met none."""
    if session.conversation.refusal is None:
        return ""
    return (
        f"; the endpoint had refused a further turn ({session.conversation.refusal}), which an agent may catch to "
        "return what it has earned so far"
    )


def _episode(session: _Session, version: int) -> Episode:
    assert session.outcome is not None
    return session.conversation.episode(session.row, session.outcome, version=version)
