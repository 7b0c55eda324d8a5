"""Tiles and their marks, against the image processor of InternVL."""

import pytest
import torch
from PIL import Image
from transformers import GotOcr2ImageProcessorPil

from shardwise.data.image_processors import Extent, InternVLProcessor, image_processor_for
from shardwise.data.image_tokens import ImageTokens
from shardwise.data.synthetic import train_tokenizer
from shardwise.families import InternVLTower
from shardwise.types import ImageRef

TOWER = InternVLTower(num_channels=3, height=16, width=16, tokens_per_tile=4)
SQUARE = {"height": 16, "width": 16}


@pytest.mark.parametrize("options", [{"crop_to_patches": False, "max_patches": 6}, {"min_patches": 2}])
def test_internvls_tiles_are_those_of_its_own_processor(options):
    """Which cuts pictures whatever its file says."""
    processor = GotOcr2ImageProcessorPil(size=SQUARE, **options)
    found = image_processor_for(TOWER, processor)
    assert isinstance(found, InternVLProcessor)
    for width, height in [(16, 8), (24, 24), (20, 36), (3, 40), (64, 48), (100, 30)]:
        picture = Image.effect_noise((width, height), 90).convert("RGB")
        expected = processor([picture], crop_to_patches=True, return_tensors="pt")["pixel_values"]
        tiles, size = found.cut(picture)
        assert torch.equal(tiles, expected)
        assert size == [height, width]
        assert found.measure(width, height) == Extent(len(tiles), 4 * len(tiles), size)


def test_tiles_stand_between_the_marks_that_the_tokenizer_names(tmp_path):
    tokenizer = train_tokenizer(["2+3=5"], vocab_size=261)
    marks = ["[START]", "[END]"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.start_image_token, tokenizer.end_image_token = marks
    start, end = tokenizer.convert_tokens_to_ids(marks)
    processor = image_processor_for(TOWER, GotOcr2ImageProcessorPil(size=SQUARE))
    image_ref = ImageRef(name="?", path="?", num_patches=2, num_tokens=8, size=[40, 16])
    assert processor.placeholder(image_ref, ImageTokens(tmp_path, tokenizer, 7)) == [start, *[7] * 8, end]
