"""Pictures in whole tokens, and the marks of their rows, against the processor of Pixtral."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from transformers import PixtralImageProcessorPil
from vision_samples import pixtral_processor

from shardwise.config import ModelError
from shardwise.data.image_processors import Extent, PixtralProcessor, image_processor_for
from shardwise.data.image_tokens import ImageTokens
from shardwise.data.synthetic import train_tokenizer
from shardwise.families import PixtralTower
from shardwise.types import ImageRef

PIXTRAL = PixtralTower(patch_size=4, merge_size=2, num_channels=3, min_tokens=2)


@pytest.mark.parametrize("size", [{"longest_edge": 48}, {"height": 40, "width": 64}])
def test_pixtrals_pictures_are_those_of_its_own_processor_in_patches(size):
    """In whole tokens of 8 x 8 pixels."""
    processor = PixtralImageProcessorPil(patch_size={"height": 4, "width": 4}, size=size)
    found = image_processor_for(PIXTRAL, processor)
    assert isinstance(found, PixtralProcessor)
    for width, height in [(16, 8), (24, 24), (20, 36), (3, 40), (64, 48), (100, 30)]:
        picture = Image.effect_noise((width, height), 90).convert("RGB")
        expected = processor([picture], patch_size=8, return_tensors="pt")
        patches, size = found.cut(picture)
        assert size == list(expected["image_sizes"][0])
        assert found.measure(width, height) == Extent(len(patches), len(patches) // 4, size)
        seen = expected["pixel_values"][0]
        rows = [
            seen[:, top : top + 4, left : left + 4] for top in range(0, size[0], 4) for left in range(0, size[1], 4)
        ]
        assert torch.equal(patches, torch.stack(rows).flatten(1))


def test_a_picture_of_fewer_tokens_than_the_model_takes_is_refused():
    """Mistral 3's projector drops the axis of its one feature; Pixtral 12B's does not."""
    processor = PixtralImageProcessorPil(patch_size={"height": 4, "width": 4})
    found = image_processor_for(PIXTRAL, processor)
    with pytest.raises(ValueError, match="1 token of 8 x 8 pixels, and the model takes no image of less than 2; enlar"):
        found.measure(8, 5)
    assert found.measure(9, 5) == Extent(8, 2, [8, 16])
    assert image_processor_for(replace(PIXTRAL, min_tokens=1), processor).measure(8, 5) == Extent(4, 1, [8, 8])


def reference(num_tokens: int, size: list[int]) -> ImageRef:
    return ImageRef(name="?", path="?", num_patches=0, num_tokens=num_tokens, size=size)


MARKS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "[ROW]"]


@pytest.fixture
def tokenizer():
    tokenizer = train_tokenizer(["2+3=5"], vocab_size=261)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    return tokenizer


@pytest.mark.parametrize("told", [{}, {"image_break_token": "[ROW]"}])
def test_rows_of_pixtral_end_with_the_marks_of_its_processor(tokenizer, tmp_path, told):
    (tmp_path / "processor_config.json").write_text(json.dumps(told))
    tokens = ImageTokens(tmp_path, tokenizer, tokenizer.convert_tokens_to_ids("[IMG]"))
    pictures = image_processor_for(PIXTRAL, PixtralImageProcessorPil())
    processor = pixtral_processor(PixtralImageProcessorPil(), tokenizer, patch_size=4, spatial_merge_size=2, **told)
    for height, width in ((16, 24), (8, 16), (24, 8)):
        text = processor.replace_image_token({"image_sizes": [(height, width)]}, 0)
        found = pictures.placeholder(reference(height * width // 64, [height, width]), tokens)
        assert found == tokenizer.encode(text, add_special_tokens=False)


def test_a_tokenizer_without_a_mark_is_refused(tmp_path):
    tokens = ImageTokens(tmp_path, train_tokenizer(["2+3=5"], vocab_size=261), 5)
    pictures = image_processor_for(PIXTRAL, PixtralImageProcessorPil())
    with pytest.raises(ModelError, match=r"the tokenizer has no token '\[IMG_BREAK\]', which the model's processor"):
        pictures.placeholder(reference(2, [8, 16]), tokens)
