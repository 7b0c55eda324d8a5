"""The tokens that stand for an image in a sequence: one for each feature that the tower makes of it, and marks."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.config import ModelError
from shardwise.data.image_processors import read_keys
from shardwise.families import PixtralTower, TileTower, Tower
from shardwise.types import ImageRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TILE_MARKS = ("start_image_token", "end_image_token")
"""What the tokenizer of InternVL names beside its other special tokens."""
Placeholder = Callable[[ImageRef], list[int]]
"""The tokens that stand for an image."""
_ROW_MARKS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
"""Key of processor_config.json -> what transformers' PixtralProcessor has for it where it is not there."""


def placeholder_of(
    folder: Path, tower: Tower, tokenizer: "PreTrainedTokenizerBase", image_token_id: int
) -> Placeholder:
    """Returns what the processor of the model in `folder` puts in the place of the image token that its chat template
    writes.

    Raises:
        ModelError: the tokenizer has no token for a mark.
    """
    match tower:
        case PixtralTower():
            told = read_keys(folder / "processor_config.json")
            marks = [told.get(key, default) for key, default in _ROW_MARKS.items()]
            row_end, image_end = (_token_id(tokenizer, mark, folder) for mark in marks)
            return lambda image_ref: _rows(image_ref, tower.token_size, image_token_id, row_end, image_end)
        case TileTower(is_cut=True):
            start, end = (_named_token_id(tokenizer, name, folder) for name in _TILE_MARKS)
            return lambda image_ref: [start, *[image_token_id] * image_ref.num_tokens, end]
    return lambda image_ref: [image_token_id] * image_ref.num_tokens


def _named_token_id(tokenizer: "PreTrainedTokenizerBase", name: str, folder: Path) -> int:
    token = getattr(tokenizer, name, None)
    if token is None:
        raise ModelError(
            f"{folder}: the tokenizer does not say what its {name} is, which the model's processor writes beside an "
            f'image; name it under "extra_special_tokens" in tokenizer_config.json'
        )
    return _token_id(tokenizer, token, folder)


def _rows(image_ref: ImageRef, token_size: int, image_token_id: int, row_end: int, image_end: int) -> list[int]:
    height, width = (pixels // token_size for pixels in image_ref.size)
    rows = [*[image_token_id] * width, row_end] * height
    return [*rows[:-1], image_end]


def _token_id(tokenizer: "PreTrainedTokenizerBase", token: str, folder: Path) -> int:
    token_id = tokenizer.get_vocab().get(token)
    if token_id is None:
        raise ModelError(
            f"{folder}: the tokenizer has no token {token!r}, which the model's processor writes for an image; take "
            "the tokenizer that belongs to the model"
        )
    return token_id
