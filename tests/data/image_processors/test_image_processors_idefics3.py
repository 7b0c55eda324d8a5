"""Tiles and their marks, against the image processors of Idefics 3 and SmolVLM."""

import pytest
import torch
from PIL import Image
from transformers import Idefics3ImageProcessorPil, SmolVLMImageProcessorPil
from vision_folders import MARKED, tokenizer_with_images

from shardwise.config import ModelError
from shardwise.data.image_processors import Extent, Idefics3Processor, image_processor_for
from shardwise.data.image_tokens import ImageTokens
from shardwise.families import Idefics3Tower
from shardwise.types import ImageRef

TOWER = Idefics3Tower(num_channels=3, height=16, width=16, tokens_per_tile=4)
SIDE = {"longest_edge": 16}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"size": {"longest_edge": 48}}, id="whole tiles"),
        pytest.param({"size": {"longest_edge": 40}}, id="parts of tiles"),
        pytest.param({"size": {"longest_edge": 10}}, id="less than a tile"),
        pytest.param({"size": {"height": 20, "width": 40}}, id="one size"),
        pytest.param({"size": {"longest_edge": 48}, "do_image_splitting": False}, id="unsplit"),
        pytest.param(
            {"size": {"longest_edge": 5000}, "max_image_size": {"longest_edge": 2500}},
            id="4096 pixels",
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.parametrize("kind", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
def test_tiles_and_their_grid_are_those_of_the_families_own_processors(kind, options):
    processor = kind(**({"max_image_size": SIDE} | options))
    side = processor.max_image_size["longest_edge"]
    tower = Idefics3Tower(num_channels=3, height=side, width=side, tokens_per_tile=4)
    found = image_processor_for(tower, processor)
    assert isinstance(found, Idefics3Processor)
    sizes = [(16, 8), (24, 24), (20, 36), (3, 40), (64, 48), (100, 30), (30, 11), (11, 30), (33, 32), (200, 1)]
    for width, height in sizes if side == 16 else sizes[5:6]:
        picture = Image.effect_noise((width, height), 90).convert("RGB")
        expected = processor([picture], return_row_col_info=True, return_tensors="pt")
        tiles, size = found.cut(picture)
        assert torch.equal(tiles, expected["pixel_values"][0])
        assert tiles.shape[1:] == (3, side, side)
        assert expected["pixel_attention_mask"].all()
        assert size == [height, width]
        assert found.measure(width, height) == Extent(len(tiles), 4 * len(tiles), size)
        assert found._grid(width, height) == (expected["rows"][0][0], expected["cols"][0][0])


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
@pytest.mark.parametrize(("height", "width"), [(16, 16), (16, 48), (40, 30), (30, 64)])
def test_marks_of_tiles_are_those_of_the_families_own_processors(family, height, width, tmp_path):
    words, written, make_processor = MARKED[family]
    tokenizer = tokenizer_with_images(words, written)
    if family == "smolvlm":
        tokenizer.fake_image_token = "<row_3_col_3>"  # that of Idefics 3 has one name alone
    processor = make_processor(tokenizer)
    processor.image_processor.size = processor.image_processor.size.__class__(longest_edge=max(height, width))
    picture = Image.effect_noise((width, height), 90).convert("RGB")
    expected = processor(text=["a <image> b"], images=[picture])["input_ids"][0]
    tokens = ImageTokens(tmp_path, tokenizer, tokenizer.convert_tokens_to_ids("<image>"))
    image_ref = ImageRef(name="?", path="?", num_patches=0, num_tokens=0, size=[height, width])
    found = image_processor_for(TOWER, processor.image_processor).placeholder(image_ref, tokens)
    assert [*tokenizer.encode("a "), *found, *tokenizer.encode(" b")] == expected


def test_tiles_of_idefics3_of_another_size_than_the_towers_are_refused_with_both():
    with pytest.raises(
        ModelError, match=r"max_image_size=.*364}, .* reads 16 x 16 pixels, .* set its longest_edge to 16"
    ):
        image_processor_for(TOWER, Idefics3ImageProcessorPil())


def test_a_tokenizer_without_marks_of_tiles_is_refused(tmp_path):
    tokenizer = tokenizer_with_images(["<image>"], "<image>")
    tokens = ImageTokens(tmp_path, tokenizer, tokenizer.convert_tokens_to_ids("<image>"))
    pictures = image_processor_for(TOWER, Idefics3ImageProcessorPil(max_image_size=SIDE))
    with pytest.raises(ModelError, match=r"the tokenizer has no token '<fake_token_around_image>', which the model's"):
        pictures.placeholder(ImageRef(name="?", path="?", num_patches=1, num_tokens=4, size=[8, 8]), tokens)
