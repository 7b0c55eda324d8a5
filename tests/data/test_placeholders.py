"""The tokens of images, against what the models' own processors write as text."""

import json
from dataclasses import replace

import pytest
from transformers import PixtralImageProcessorPil
from vision_samples import pixtral_processor

from shardwise.config import ModelError
from shardwise.data.placeholders import placeholder_of
from shardwise.data.synthetic import train_tokenizer
from shardwise.families import GridTower, PixtralTower, TileTower
from shardwise.types import ImageRef

MARKS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "[ROW]"]


@pytest.fixture
def tokenizer():
    tokenizer = train_tokenizer(["2+3=5"], vocab_size=261)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    return tokenizer


def reference(num_tokens: int, size: list[int]) -> ImageRef:
    return ImageRef(name="?", path="?", num_patches=0, num_tokens=num_tokens, size=size)


def test_patches_in_one_row_are_one_token_again_and_again(tokenizer, tmp_path):
    placeholder = placeholder_of(tmp_path, GridTower(merge_size=2, num_values=96), tokenizer, 7)
    assert placeholder(reference(5, [1, 2, 10])) == [7] * 5


@pytest.mark.parametrize("told", [{}, {"image_break_token": "[ROW]"}])
def test_rows_of_pixtral_end_with_the_marks_of_its_processor(tokenizer, tmp_path, told):
    (tmp_path / "processor_config.json").write_text(json.dumps(told))
    tower = PixtralTower(patch_size=4, merge_size=2, num_channels=3, min_tokens=2)
    placeholder = placeholder_of(tmp_path, tower, tokenizer, tokenizer.convert_tokens_to_ids("[IMG]"))
    processor = pixtral_processor(PixtralImageProcessorPil(), tokenizer, patch_size=4, spatial_merge_size=2, **told)
    for height, width in ((16, 24), (8, 16), (24, 8)):
        text = processor.replace_image_token({"image_sizes": [(height, width)]}, 0)
        found = placeholder(reference(height * width // 64, [height, width]))
        assert found == tokenizer.encode(text, add_special_tokens=False)


TILES = TileTower(num_channels=3, height=16, width=16, tokens_per_tile=4, is_cut=True)


def test_tiles_stand_between_the_marks_that_the_tokenizer_names(tokenizer, tmp_path):
    tokenizer.start_image_token, tokenizer.end_image_token = MARKS[1:3]
    placeholder = placeholder_of(tmp_path, TILES, tokenizer, 7)
    start, end = tokenizer.convert_tokens_to_ids(MARKS[1:3])
    assert placeholder(reference(8, [40, 16])) == [start, *[7] * 8, end]
    placeholder = placeholder_of(tmp_path, replace(TILES, is_cut=False), tokenizer, 7)
    assert placeholder(reference(4, [40, 16])) == [7] * 4  # LLaVA's one tile has none


def test_a_tokenizer_that_names_no_mark_is_refused_with_where_to_name_it(tokenizer, tmp_path):
    with pytest.raises(ModelError, match=r'what its start_image_token is, .* "extra_special_tokens" in tokenizer_conf'):
        placeholder_of(tmp_path, TILES, tokenizer, 7)(reference(4, [16, 16]))


def test_a_tokenizer_without_a_mark_is_refused(tmp_path):
    tower = PixtralTower(patch_size=4, merge_size=2, num_channels=3, min_tokens=2)
    with pytest.raises(ModelError, match=r"the tokenizer has no token '\[IMG_BREAK\]', which the model's processor"):
        placeholder_of(tmp_path, tower, train_tokenizer(["2+3=5"], vocab_size=261), 5)(reference(2, [8, 16]))
