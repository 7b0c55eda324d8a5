"""The tokens that a model's processor writes for an image."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config import ModelError
from shardwise.data.processor_files import read_keys

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ImageTokens:
    """Where a model folder names them. Those that are asked for and missing are a ModelError."""

    def __init__(self, folder: Path, tokenizer: "PreTrainedTokenizerBase", image_id: int) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self.image_id = image_id
        """Stands for a part of an image, and for all of it where a chat template writes it."""

    def configured(self, key: str, default: str) -> int:
        """The token that processor_config.json has under `key`, or `default`."""
        return self._token_id(self._configured.get(key, default))

    @property
    def image(self) -> str:
        """How `image_id` is spelt."""
        return str(self._tokenizer.decode([self.image_id]))

    def named(self, name: str, default: str | None = None) -> int:
        """The token that the tokenizer itself calls `name`, or `default`."""
        token = getattr(self._tokenizer, name, default)
        if token is None:
            raise ModelError(
                f"{self._folder}: the tokenizer does not say what its {name} is, which the model's processor writes "
                f'beside an image; name it under "extra_special_tokens" in tokenizer_config.json'
            )
        return self._token_id(token)

    def spelling(self, name: str, default: str | None = None) -> str:
        """How the token is spelt that is `named` so."""
        return str(self._tokenizer.convert_ids_to_tokens(self.named(name, default)))

    def encoded(self, text: str) -> list[int]:
        """The tokens of a text that begins and ends with marks, whatever stands around it."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _configured(self) -> dict[str, Any]:
        return read_keys(self._folder / "processor_config.json")

    def _token_id(self, token: str) -> int:
        tokenizer = self._tokenizer
        token_id = tokenizer.convert_tokens_to_ids(token)
        if token_id is None or tokenizer.convert_ids_to_tokens(token_id) != token:  # but that of what it does not know
            raise ModelError(
                f"{self._folder}: the tokenizer has no token {token!r}, which the model's processor writes for an "
                "image; take the tokenizer that belongs to the model"
            )
        assert isinstance(token_id, int)
        return token_id
