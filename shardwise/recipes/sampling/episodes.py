"""Completions of several turns: the policy speaks and an environment answers, until one of them is done."""

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from shardwise.config import DataError, EnvironmentConfig
from shardwise.data import longest_token, render_observation
from shardwise.environments import EnvironmentCaller
from shardwise.rewards import Answer, describe_error, read_score
from shardwise.types import Completion, Example, GenerateRequest

Generate = Callable[[list[GenerateRequest]], list[list[Completion]]]


@dataclass(slots=True)
class Episode:
    """A completion, and what was said in it."""

    example: Example
    completion: Completion
    turns: list[str] = field(default_factory=list)
    """The policy's turns, as text."""
    said: list[dict[str, Any]] = field(default_factory=list)
    """Messages after the prompt: turns and the environment's answers."""
    outcome: Answer | None = None
    """The environment's or agent's verdict; None if there is none."""

    @property
    def last_turn(self) -> str:
        """Text of the last turn; empty if an agent failed before the first one."""
        return self.turns[-1] if self.turns else ""

    @property
    def ids_before_last_turn(self) -> list[int]:
        """The completion's tokens before the last turn: earlier turns, and what the environment said."""
        return self.completion.token_ids[: self.completion.turn_starts[-1]] if self.turns else []


@dataclass(slots=True)
class _Game:
    """An episode that is being played."""

    episode: Episode
    request: GenerateRequest
    """The request for its first turn."""
    environment: Any = None
    is_over: bool = False

    def fail(self, method: str, why: str) -> None:
        """Ends the game without a score. If there are several failures, the first one is kept."""
        if self.episode.outcome is None or self.episode.outcome.failure is None:
            self.episode.outcome = Answer(failure=f"{method}() {why}")
        self.is_over = True

    def next_request(self) -> GenerateRequest:
        """Returns the request for the next turn. It continues the very tokens that were sampled and observed, without
        tokenizing text again."""
        so_far = self.episode.completion.token_ids
        return replace(
            self.request,
            prompt_ids=self.request.prompt_ids + so_far,
            max_tokens=self.request.max_tokens - len(so_far),
        )


def empty_completion() -> Completion:
    """Returns the completion before the first turn."""
    return Completion(
        token_ids=[], logprobs=[], finish_reason="length", policy_version=0, is_sampled=[], turn_starts=[]
    )


def with_turn(before: Completion, turn: Completion) -> Completion:
    """Returns a completion after one more turn of the policy."""
    return replace(before.then(turn), turn_starts=[*before.turn_starts, len(before.token_ids)])


def with_observation(before: Completion, token_ids: list[int]) -> Completion:
    """Returns a completion after further tokens, which the policy did not sample."""
    observed = replace(
        before,
        token_ids=token_ids,
        logprobs=[0.0] * len(token_ids),
        policy_version=before.newest_version,
        token_versions=None,
        is_sampled=[False] * len(token_ids),
        spans=[],
    )
    return before.then(observed)


def _begin(example: Example, request: GenerateRequest) -> list[_Game]:
    """Returns a game for each completion of a request."""
    return [_Game(Episode(example, empty_completion()), one) for one in request.one_by_one()]


class Episodes:
    """Plays the episodes of a whole batch in environments at the same time. A context manager."""

    def __init__(
        self,
        config: EnvironmentConfig,
        environment: Callable[[], Any],
        tokenizer: PreTrainedTokenizerBase,
        generate: Generate,
        *,
        media_token_ids: Collection[int] = (),
    ) -> None:
        """`environment` makes an environment for a completion, whose answers may not bring in `media_token_ids`."""
        self._config = config
        self._new_environment = environment
        self._tokenizer = tokenizer
        self._generate = generate
        self._longest_token = longest_token(tokenizer)
        self._media_token_ids = media_token_ids
        self._caller = EnvironmentCaller(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._caller.close()

    def play(self, examples: Sequence[Example], requests: Sequence[GenerateRequest]) -> list[list[Episode]]:
        """Plays the episodes of every example, as many as its request asks for. Whatever happens, no environment is
        left open."""
        groups = [_begin(example, request) for example, request in zip(examples, requests, strict=True)]
        games = [game for group in groups for game in group]
        try:
            self._make_environments(games)
            self._call(games, "reset", lambda game: (deepcopy(game.episode.example),))
            self._take_turns(games, requests)
            self._score([game for game in games if game.episode.outcome is None])
        finally:
            self._call(games, "close")
        return [[game.episode for game in group] for group in groups]

    def _make_environments(self, games: Sequence[_Game]) -> None:
        for game, made in zip(games, self._caller.call([self._new_environment] * len(games)), strict=True):
            if isinstance(made, BaseException):
                game.fail("__init__", f"failed: {describe_error(made)}")
            else:
                game.environment = made

    def _take_turns(self, games: Sequence[_Game], requests: Sequence[GenerateRequest]) -> None:
        playing, turns = games, [turn for group in self._generate(list(requests)) for turn in group]
        while playing:
            for game, turn in zip(playing, turns, strict=True):
                self._take_turn(game, turn)
            self._answer([game for game in playing if not game.is_over])
            playing = [game for game in playing if not game.is_over]
            turns = [turn for (turn,) in self._generate([game.next_request() for game in playing])] if playing else []

    def _call(
        self,
        games: Sequence[_Game],
        method: str,
        arguments: Callable[[_Game], tuple[Any, ...]] = lambda _: (),
    ) -> list[tuple[_Game, Any]]:
        """Calls a method of every game's environment. Returns (game, returned value) for calls that did not fail."""
        games = [game for game in games if game.environment is not None]
        calls = [partial(getattr(game.environment, method), *arguments(game)) for game in games]
        answered = []
        for game, returned in zip(games, self._caller.call(calls), strict=True):
            if isinstance(returned, BaseException):
                game.fail(method, f"failed: {describe_error(returned)}")
            else:
                answered.append((game, returned))
        return answered

    def _take_turn(self, game: _Game, turn: Completion) -> None:
        episode = game.episode
        episode.completion = with_turn(episode.completion, turn)
        text = self._tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        episode.turns.append(text)
        episode.said.append({"role": "assistant", "content": text})
        game.is_over |= turn.finish_reason == "length"

    def _answer(self, games: Sequence[_Game]) -> None:
        """Lets the environments answer the last turn, and appends their answers."""
        for game, observation in self._call(games, "step", lambda game: (game.episode.turns[-1],)):
            if observation is None:
                game.is_over = True
                continue
            before = game.episode.completion
            try:
                token_ids = render_observation(
                    self._tokenizer,
                    observation,
                    apply_chat_template=game.episode.example.messages is not None,
                    last_token_id=before.token_ids[-1],
                    origin="the environment's answer",
                    max_chars=(game.request.max_tokens - len(before.token_ids)) * self._longest_token,
                    media_token_ids=self._media_token_ids,
                )
            except DataError as error:
                game.fail("step", f"returned what cannot be read: {error}")
                continue
            self._observe(game, observation, token_ids)

    def _observe(self, game: _Game, observation: str | list[dict[str, Any]], token_ids: list[int] | None) -> None:
        """Appends an observation, or ends the game if no turn could follow it."""
        before = game.episode.completion
        num_left = game.request.max_tokens - len(before.token_ids)
        if token_ids is None or len(token_ids) >= num_left or before.num_turns == self._config.max_turns:
            game.episode.completion = replace(before, finish_reason="length")
            game.is_over = True
            return
        game.episode.completion = with_observation(before, token_ids)
        game.episode.said += [{"role": "user", "content": observation}] if isinstance(observation, str) else observation

    def _score(self, games: Sequence[_Game]) -> None:
        for game, returned in self._call(games, "reward"):
            answer = Answer(**read_score(returned))
            if answer.failure is None:
                game.episode.outcome = answer
            else:
                game.fail("reward", answer.failure)
