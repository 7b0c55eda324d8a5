"""Loads the tokenizer that belongs to a model, and checks that the two fit."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.config import ModelConfig, ModelError, in_one_line
from shardwise.data.processor_files import read_keys

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEGACY_TEMPLATE = "chat_template.json"
"""Where older folders of models that see images have their chat template: a file of their processor."""


def load_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer that belongs to a model, with `config.chat_template` in place of its own where one is given.

    Raises:
        ModelError: there is no tokenizer, no such template file, or no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    path = config.tokenizer_path or config.path
    is_folder = Path(path).is_dir()
    if not is_folder and path.startswith(("/", ".", "~")):
        raise ModelError(f"tokenizer folder {path} does not exist; set model.path or model.tokenizer_path to one")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=is_folder, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise all kinds here, a bare Exception among them
        _require_readable(Path(path) / "config.json")
        raise ModelError(
            f"no tokenizer can be loaded from {path} ({in_one_line(error)[:300]}); "
            "set model.tokenizer_path to a folder with tokenizer.json and tokenizer_config.json"
        ) from error
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):  # what transformers builds from a config.json alone
        raise ModelError(
            f"the tokenizer in {path} has no vocabulary: its tokenizer.json is missing; add the file or set "
            "model.tokenizer_path"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer in {path} has no end-of-sequence token, so a response would never end; "
            "set eos_token in its tokenizer_config.json"
        )
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = read_keys(Path(path) / LEGACY_TEMPLATE).get("chat_template")
    return tokenizer


def _require_readable(config: Path) -> None:
    """Checks config.json, which transformers reads before the tokenizer. Raises ModelError: it exists, but cannot be
    read as a JSON object."""
    try:
        if config.is_file() and not isinstance(json.loads(config.read_text(encoding="utf-8")), dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(f"{config} cannot be read: {error}; download or copy it again") from None


def read_template(path: str) -> str:
    """Returns the text of the file model.chat_template. Raises ModelError: it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"model.chat_template={path} cannot be read ({error}); give a Jinja file, or null for the tokenizer's own"
        ) from None


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> None:
    """Checks that the model embeds every token that text, the chat template or the end of a sequence can produce.

    A model with spare rows (a padded vocabulary) is fine, and so is a token that was added for other models: the
    tokenizer of Gemma 3 has one for images, for which its text models have no row. The engine refuses it in data.

    Raises:
        ModelError: such a token's id lies beyond the model's vocabulary; names both numbers.
    """
    template, added = str(tokenizer.chat_template), tokenizer.get_added_vocab()
    named = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    largest = max(
        token_id
        for token, token_id in tokenizer.get_vocab().items()
        if token not in added or token in named or token in template
    )
    if largest >= vocab_size:
        raise ModelError(
            f"the tokenizer has token ids up to {largest}, the model's vocabulary ends at {vocab_size - 1}; "
            "set model.tokenizer_path to the tokenizer that the model was made with"
        )


def longest_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Returns the most characters that one token can stand for: n tokens spell at most n times as many."""
    return max(map(len, tokenizer.get_vocab()))
