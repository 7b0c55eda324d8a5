"""Limits of requests that hold for every engine: engines themselves would fail deep inside, or compute nonsense."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from transformers import PretrainedConfig

from shardwise.config import LARGEST_TEMPERATURE, LARGEST_TOP_K, LEAST_TEMPERATURE, DataError
from shardwise.families import context_of
from shardwise.types import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of a model, or of an engine that accepts less."""

    vocab_size: int
    context_tokens: int | None
    """Largest length of a prompt and its completion together; None: no limit."""
    context_key: str = "max_position_embeddings in config.json"
    """What sets `context_tokens`, for messages."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        """Returns the limits of a model."""
        text_config = config.get_text_config()
        context_tokens, key = context_of(text_config)
        return cls(
            vocab_size=text_config.vocab_size, context_tokens=context_tokens, context_key=f"{key} in config.json"
        )

    def require(self, requests: Sequence[GenerateRequest]) -> None:
        """Raises DataError, which names the request, if one is empty, asks for no token, has a token outside the
        vocabulary, is too long, or has a sampling setting out of range."""
        for request in requests:
            if fault := self._fault(request):
                raise DataError(f"request {request.uid}: {fault}")

    def require_scorable(self, sequences: Sequence[Sequence[int]]) -> None:
        """Raises DataError, which names the sequence, if one is empty, has a token outside the vocabulary, or is too
        long."""
        for place, sequence in enumerate(sequences):
            if fault := self._fault_of_tokens(sequence, "it") or self._too_long(len(sequence), "its tokens"):
                raise DataError(f"sequence {place} to score: {fault}")

    def _fault(self, request: GenerateRequest) -> str | None:
        given = request.prompt_ids + request.partial_token_ids if request.prompt_ids else []
        both = f"a prompt of {len(given)} tokens and its max_tokens={request.max_tokens}"
        return (
            self._fault_of_tokens(given, "its prompt")
            or _fault_of_sampling(request)
            or self._too_long(len(given) + request.max_tokens, both)
        )

    def _fault_of_tokens(self, tokens: Sequence[int], what: str) -> str | None:
        if not tokens:
            return f"{what} has no token; give it at least one, such as the one that begins a text"
        if min(tokens) >= 0 and max(tokens) < self.vocab_size:
            return None
        place, token = next((p, token) for p, token in enumerate(tokens) if not 0 <= token < self.vocab_size)
        return (
            f"token {place} of {what} is {token}, but the model's vocabulary begins at 0 and ends at "
            f"{self.vocab_size - 1}; use the model's own tokenizer"
        )

    def _too_long(self, num_tokens: int, what: str) -> str | None:
        if self.context_tokens is None or num_tokens <= self.context_tokens:
            return None
        return f"{what} are {num_tokens}, more than the {self.context_tokens} of {self.context_key}; shorten them"


def _fault_of_sampling(request: GenerateRequest) -> str | None:
    """Says which sampling setting is out of range, if any. NaN is in no range."""
    temperature = request.temperature
    problems = {
        "max_tokens": (request.max_tokens >= 1, "a completion has at least 1"),
        "num_completions": (request.num_completions >= 0, "give 0 or more"),
        "temperature": (
            temperature == 0 or LEAST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE,
            f"give {LEAST_TEMPERATURE:g} to {LARGEST_TEMPERATURE:g}, or 0 for the likeliest token",
        ),
        "top_k": (0 <= request.top_k <= LARGEST_TOP_K, f"give 1 to {LARGEST_TOP_K}, or 0 for no limit"),
        "top_p": (0 < request.top_p <= 1, "give more than 0 and at most 1, which is all"),
        "min_p": (0 <= request.min_p < 1, "give at least 0, which is all, and less than 1"),
        "stop": (all(request.stop), "every text holds an empty string; leave it out"),
    }
    return next(
        (f"{name}={getattr(request, name)!r}; {allowed}" for name, (holds, allowed) in problems.items() if not holds),
        None,
    )
