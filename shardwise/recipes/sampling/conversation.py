"""An episode whose turns are asked for by chat requests: translates between messages and the tokens to train on."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NoReturn

from transformers import PreTrainedTokenizerBase

from shardwise.config import DataError
from shardwise.data import render_observation, render_prompt, without_nulls
from shardwise.environments import chat_format
from shardwise.environments.chat_format import ApiError, ChatAnswer, ChatRequest, Message
from shardwise.recipes.sampling.episodes import Episode, empty_completion, with_observation, with_turn
from shardwise.rewards import Answer
from shardwise.rollout.stop_strings import before_stop
from shardwise.types import Completion, Example, GenerateRequest

ORIGIN = "the request"
"""Name of the rendered text in errors."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a conversation may hold."""

    max_prompt_tokens: int
    """Most tokens of the first request's messages, rendered."""
    max_turns: int
    longest_token: int
    """Characters of the longest token: text too long for the allowed tokens is refused before it is tokenized."""
    media_token_ids: Collection[int] = ()
    """Tokens that no message may spell."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that continues the conversation."""

    messages: list[Message]
    """All messages, in their plain form."""
    observed: list[int]
    """Tokens of the messages that are new in it; none for the first request, whose tokens are the prompt's."""
    reads_calls: bool
    request: GenerateRequest
    """The request for its turn."""
    answer: "Future[ChatAnswer]" = field(default_factory=Future)


class Conversation:
    """One conversation that only grows. Not safe to use from two threads at a time.

    The first request's messages are the prompt. From then on a request repeats all earlier messages and adds new ones.
    A turn of the policy is recognized by its message and keeps the tokens that were sampled; new messages are rendered
    by themselves after it. A request that only repeats the last one gets the same answer again.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        request: GenerateRequest,
        limits: Limits,
        *,
        call_format: str,
    ) -> None:
        """
        Args:
            request: how turns are sampled, all together with at most `max_tokens`; its uid tells conversations apart.
        """
        self._tokenizer = tokenizer
        self._request = request
        self._limits = limits
        self._call_format = call_format
        self._tools: list[dict[str, Any]] = []
        self._prompt: list[Message] = []
        self._prompt_ids: list[int] = []
        self._completion = empty_completion()
        self._messages: list[Message] = []
        self._said: list[Message] = []
        self._turns: list[str] = []
        self._asked: Asked | None = None
        self.refusal: str | None = None
        """Why a limit allowed no further turn; None if none did."""

    @property
    def num_turns(self) -> int:
        """Number of the policy's turns so far."""
        return len(self._turns)

    def ask(self, chat: ChatRequest) -> Asked:
        """Takes a request.

        Returns:
            The request to answer, or one that was answered already.
        Raises:
            ApiError: the request does not continue the conversation, samples differently from the run, or would exceed
                a limit. The conversation stays as it was.
        """
        chat_format.require_sampling(chat, self._request)
        messages = [chat_format.plain_message(message, n) for n, message in enumerate(chat.messages, start=1)]
        tools = without_nulls(chat.tools or [])
        if self._asked is not None and tools != self._tools:
            raise ApiError(
                400,
                "the tools are not those of the first request, which the prompt tells the policy of; give the same "
                "tools with every request of an episode",
                param="tools",
            )
        if self._asked is not None and self._repeats(messages):
            return self._asked
        if self._asked is not None and not self._asked.answer.done():
            raise ApiError(400, "another request of this episode is being answered; an episode is one conversation")
        try:
            self._asked = self._first(chat, messages, tools) if self._asked is None else self._next(chat, messages)
        except DataError as error:
            raise ApiError(400, str(error), param="messages") from None
        self.refusal = None
        return self._asked

    def take(self, turn: Completion) -> None:
        """Answers the last request with a turn of the policy."""
        asked = self._asked
        assert asked is not None
        self._completion = with_turn(with_observation(self._completion, asked.observed), turn)
        text = self._tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        message = chat_format.read_turn(
            before_stop(text, self._request.stop),
            self.num_turns,
            # One that was cut may lack arguments, and reads as if it were whole.
            call_format=self._call_format if asked.reads_calls and turn.finish_reason == "stop" else None,
            tools=self._tools,
        )
        new = asked.messages[len(self._messages) :] if self._turns else []
        self._said += [*new, {"role": "assistant", "content": text}]
        self._messages = [*asked.messages, message]
        self._turns.append(text)
        ended: Literal["tool_calls", "stop"] = "tool_calls" if "tool_calls" in message else "stop"
        asked.answer.set_result(
            ChatAnswer(
                id=f"chatcmpl-{asked.request.uid}",
                message=message,
                finish_reason=ended if turn.finish_reason == "stop" else "length",
                num_prompt_tokens=len(asked.request.prompt_ids),
                decode_tokens=partial(_decoded_one_by_one, self._tokenizer, turn.token_ids),
                logprobs=turn.logprobs,
            )
        )

    def close(self, why: str) -> None:
        """Answers a request that still waits, with an error."""
        if self._asked is not None and not self._asked.answer.done():
            self._asked.answer.set_exception(ApiError(503, why, code="episode_over"))

    @property
    def completion(self) -> Completion:
        """The tokens that were sampled so far, and those of the messages in between."""
        return self._completion

    def episode(self, row: Example, outcome: Answer, *, version: int) -> Episode:
        """Returns the conversation as an episode of a row.

        Args:
            version: the policy's version if it did not get as far as a turn.
        """
        completion = self._completion
        if not self._turns:
            return Episode(row, replace(completion, policy_version=version), outcome=outcome)
        if self._prompt_ids != row.prompt_ids:
            completion = replace(completion, prompt_ids=self._prompt_ids)
        if self.refusal is not None:
            completion = replace(completion, finish_reason="length")
        example = replace(
            row,
            prompt_ids=self._prompt_ids,
            prompt=self._tokenizer.decode(self._prompt_ids),
            messages=self._prompt,
        )
        return Episode(example, completion, turns=self._turns, said=self._said, outcome=outcome)

    def _repeats(self, messages: list[Message]) -> bool:
        assert self._asked is not None
        last = self._asked.messages
        return len(messages) == len(last) and all(map(self._says_the_same, messages, last))

    def _says_the_same(self, one: Message, other: Message) -> bool:
        return chat_format.says_the_same(one, other, self._request.stop)

    def _first(self, chat: ChatRequest, messages: list[Message], tools: list[dict[str, Any]]) -> Asked:
        num_chars = sum(len(message["content"]) for message in messages)
        if num_chars > self._limits.max_prompt_tokens * self._limits.longest_token:
            self._refuse(
                f"the prompt has {num_chars} characters, more than the maximum context length of "
                f"data.max_prompt_tokens={self._limits.max_prompt_tokens} can hold"
            )
        prompt_ids = render_prompt(
            self._tokenizer,
            messages,
            apply_chat_template=True,
            system_prompt=None,
            origin=ORIGIN,
            tools=tools,
            media_token_ids=self._limits.media_token_ids,
        )
        if len(prompt_ids) > self._limits.max_prompt_tokens:
            self._refuse(
                f"the prompt has {len(prompt_ids)} tokens, the maximum context length leaves it "
                f"data.max_prompt_tokens={self._limits.max_prompt_tokens}"
            )
        self._prompt, self._prompt_ids, self._tools = messages, prompt_ids, tools
        return self._asking(chat, messages, [])

    def _next(self, chat: ChatRequest, messages: list[Message]) -> Asked:
        new = self._new_messages(messages)
        num_used = len(self._completion.token_ids)
        observed = render_observation(
            self._tokenizer,
            new,
            apply_chat_template=True,
            last_token_id=self._completion.token_ids[-1],
            origin=ORIGIN,
            max_chars=(self._request.max_tokens - num_used) * self._limits.longest_token,
            media_token_ids=self._limits.media_token_ids,
        )
        if self.num_turns == self._limits.max_turns:
            self._refuse(
                f"the episode has had its rollout.environment.max_turns={self._limits.max_turns}", code="max_turns"
            )
        if observed is None or num_used + len(observed) >= self._request.max_tokens:
            size = "more characters than the others can hold" if observed is None else str(len(observed))
            self._refuse(
                f"no room for another turn: turns and messages have {num_used} tokens, the new messages "
                f"{size}, and the maximum context length leaves them "
                f"rollout.max_response_tokens={self._request.max_tokens}"
            )
        return self._asking(chat, messages, observed)

    def _asking(self, chat: ChatRequest, messages: list[Message], observed: list[int]) -> Asked:
        before = self._completion.token_ids + observed
        num_left = self._request.max_tokens - len(before)
        request = replace(
            self._request,
            uid=f"{self._request.uid}/turn {self.num_turns}",  # so random draws do not depend on timing
            prompt_ids=self._prompt_ids + before,
            max_tokens=num_left if chat.token_limit is None else min(num_left, chat.token_limit),
        )
        return Asked(messages, observed, bool(chat.tools) and chat.tool_choice != "none", request)

    def _new_messages(self, messages: list[Message]) -> list[Message]:
        for number, (said, given) in enumerate(zip(self._messages, messages, strict=False), start=1):
            if not self._says_the_same(said, given):
                raise ApiError(
                    400,
                    f"message {number} is not what was said before in this episode: "
                    f"{chat_format.preview(given)}, expected {chat_format.preview(said)}. An episode is one "
                    "conversation that only grows: send its messages as they were and were answered, and new ones "
                    "after them",
                    param=f"messages[{number - 1}]",
                )
        new = messages[len(self._messages) :]
        if not new:
            raise ApiError(
                400,
                f"the {len(messages)} messages add nothing to the {len(self._messages)} of this episode so far; send "
                "all of them and new ones after them",
                param="messages",
            )
        if any(message["role"] == "assistant" for message in new):
            raise ApiError(
                400,
                "there is a new message of the assistant's, which the policy did not say; add messages of user, tool "
                "or system",
                param="messages",
            )
        return new

    def _refuse(self, why: str, *, code: str = chat_format.CONTEXT_EXCEEDED) -> NoReturn:
        self.refusal = why
        raise ApiError(400, why, code=code, param="messages")


def _decoded_one_by_one(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in token_ids]
