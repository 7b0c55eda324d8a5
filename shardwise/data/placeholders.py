"""The tokens that stand for an image in a sequence: one for each feature that the tower makes of it, and marks."""

from collections.abc import Callable
from functools import cache, partial
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
    writes. Called, it raises ModelError if the tokenizer has no token for a mark: words are read without."""

    @cache
    def row_marks() -> list[int]:
        told = read_keys(folder / "processor_config.json")
        return [_token_id(tokenizer, told.get(key, default), folder) for key, default in _ROW_MARKS.items()]

    def in_rows(image_ref: ImageRef, token_size: int) -> list[int]:
        row_end, image_end = row_marks()
        height, width = (pixels // token_size for pixels in image_ref.size)
        rows = [*[image_token_id] * width, row_end] * height
        return [*rows[:-1], image_end]

    @cache
    def tile_marks() -> list[int]:
        return [_named_token_id(tokenizer, name, folder) for name in _TILE_MARKS]

    def between_marks(image_ref: ImageRef) -> list[int]:
        start, end = tile_marks()
        return [start, *[image_token_id] * image_ref.num_tokens, end]

    match tower:
        case PixtralTower():
            return partial(in_rows, token_size=tower.token_size)
        case TileTower(is_cut=True):
            return between_marks
    return lambda image_ref: [image_token_id] * image_ref.num_tokens


def _named_token_id(tokenizer: "PreTrainedTokenizerBase", name: str, folder: Path) -> int:
    token = getattr(tokenizer, name, None)
    if token is None:
        raise ModelError(
            f"{folder}: the tokenizer does not say what its {name} is, which the model's processor writes beside an "
            f'image; name it under "extra_special_tokens" in tokenizer_config.json'
        )
    return _token_id(tokenizer, token, folder)


def _token_id(tokenizer: "PreTrainedTokenizerBase", token: str, folder: Path) -> int:
    token_id = tokenizer.convert_tokens_to_ids(token)
    if token_id is None or tokenizer.convert_ids_to_tokens(token_id) != token:  # but that of what it does not know
        raise ModelError(
            f"{folder}: the tokenizer has no token {token!r}, which the model's processor writes for an image; take "
            "the tokenizer that belongs to the model"
        )
    assert isinstance(token_id, int)
    return token_id
