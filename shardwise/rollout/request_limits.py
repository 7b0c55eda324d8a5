"""What a request may hold, whatever the engine: engines themselves would fail deep inside, or go on with nonsense."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from transformers import PretrainedConfig

from shardwise.config import DataError
from shardwise.types import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Of a model, or of an engine that takes less."""

    vocab_size: int
    context_tokens: int | None
    """Of a prompt and its completion; None where nothing limits them."""
    context_key: str = "max_position_embeddings in config.json"
    """What sets it."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        """Those of a model."""
        text_config = config.get_text_config()
        context_tokens = getattr(text_config, "max_position_embeddings", None)
        return cls(vocab_size=text_config.vocab_size, context_tokens=context_tokens)

    def require(self, requests: Sequence[GenerateRequest]) -> None:
        """Raises DataError: names the request that is empty, asks for no token, has one that the vocabulary lacks, or
        is too long."""
        for request in requests:
            if fault := self._fault(request):
                raise DataError(f"request {request.uid}: {fault}")

    def _fault(self, request: GenerateRequest) -> str | None:
        given = request.prompt_ids + request.begun
        if not request.prompt_ids:
            return "its prompt has no token; give it at least one, such as the one that begins a text"
        if request.max_tokens < 1:
            return f"max_tokens={request.max_tokens}; a completion has at least 1"
        if min(given) < 0 or max(given) >= self.vocab_size:
            place, token = next((p, token) for p, token in enumerate(given) if not 0 <= token < self.vocab_size)
            return (
                f"token {place} of its prompt is {token}, but the model's vocabulary begins at 0 and ends at "
                f"{self.vocab_size - 1}; use the model's own tokenizer"
            )
        length = len(given) + request.max_tokens
        if self.context_tokens is not None and length > self.context_tokens:
            return (
                f"a prompt of {len(given)} tokens and its max_tokens={request.max_tokens} are {length}, more than the "
                f"{self.context_tokens} of {self.context_key}; shorten one of them"
            )
        return None
