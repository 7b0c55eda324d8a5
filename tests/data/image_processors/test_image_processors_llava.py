"""Tiles, against the image processors of LLaVA, LLaVA-NeXT and LLaVA-OneVision."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    LlavaImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
    SiglipImageProcessorPil,
)

from shardwise.config import ModelError
from shardwise.data.image_processors import Extent, image_processor_for
from shardwise.families import LlavaNextTower, LlavaOnevisionTower, LlavaTower
from shardwise.types import ImageRef

TOWER = LlavaTower(num_channels=3, height=16, width=16, tokens_per_tile=4)
SQUARE = {"height": 16, "width": 16}


@pytest.mark.parametrize(
    "processor",
    [
        CLIPImageProcessorPil(size={"shortest_edge": 20}, crop_size=SQUARE),
        LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size=SQUARE, do_pad=True),
        SiglipImageProcessorPil(size=SQUARE),
    ],
)
def test_llavas_one_tile_is_that_of_its_own_processor(processor):
    found = image_processor_for(TOWER, processor)
    for width, height in [(16, 8), (24, 24), (3, 40), (64, 48)]:
        picture = Image.effect_noise((width, height), 90).convert("RGB")
        tiles, size = found.cut(picture)
        assert torch.equal(tiles, processor([picture], return_tensors="pt")["pixel_values"])
        assert tiles.shape == (1, 3, 16, 16)
        assert found.measure(width, height) == Extent(1, 4, size)
        assert size == [height, width]


PINPOINTS = [[16, 32], [32, 16], [32, 32], [48, 16]]
NEXT = LlavaNextTower(tiles=TOWER, pinpoints=[tuple(size) for size in PINPOINTS])


def test_llava_nexts_tiles_are_those_of_its_own_processor():
    processor = LlavaNextImageProcessorPil(size={"shortest_edge": 16}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS)
    found = image_processor_for(NEXT, processor)
    counting = SimpleNamespace(image_processor=processor, patch_size=8, num_additional_image_tokens=0)
    counting._get_unpadded_features = partial(LlavaNextProcessor._get_unpadded_features, counting)
    for width, height in [(16, 8), (24, 24), (20, 36), (3, 40), (64, 48), (100, 30), (31, 33), (9, 200)]:
        picture = Image.effect_noise((width, height), 90).convert("RGB")
        tiles, size = found.cut(picture)
        assert torch.equal(tiles, processor([picture], return_tensors="pt")["pixel_values"][0])
        num_tokens = LlavaNextProcessor._get_number_of_features(counting, height, width, 16, 16)
        assert found.measure(width, height) == Extent(len(tiles), num_tokens, size)
        assert size == [height, width]
    with pytest.raises(
        ModelError, match=r"image_grid_pinpoints=\[\(16, 32\)\] of the image processor are not \[\(16, 32"
    ):
        image_processor_for(
            NEXT, LlavaNextImageProcessorPil(size=SQUARE, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS[:1])
        )


ONEVISION = LlavaOnevisionTower(tiles=TOWER, pinpoints=NEXT.pinpoints, max_tiles=2)


def test_llava_onevisions_tiles_are_those_of_its_own_processor_alone_and_beside_others():
    processor = LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=PINPOINTS)
    found = image_processor_for(ONEVISION, processor)
    counting = SimpleNamespace(image_processor=processor, num_image_tokens=4, vision_aspect_ratio="anyres_max_2")
    counting._get_unpadded_features = partial(LlavaOnevisionProcessor._get_unpadded_features, counting)
    pictures = []
    for width, height in [(16, 8), (24, 24), (20, 36), (3, 40), (64, 48), (100, 30), (31, 33), (9, 200)]:
        picture = Image.effect_noise((width, height), 90).convert("RGB")
        extent = found.measure(width, height)
        num_tokens = LlavaOnevisionProcessor._get_number_of_features(counting, height, width, 16, 16)
        image_ref = ImageRef(
            name="?", path="?", num_patches=extent.num_patches, num_tokens=extent.num_tokens, size=extent.size
        )
        tiles, size = found.patches_of(picture, image_ref)
        assert torch.equal(tiles, processor([picture], return_tensors="pt")["pixel_values"][0])
        assert extent == Extent(len(tiles), num_tokens, size)
        pictures.append((picture, found.beside_others(image_ref)))
    several = processor([[picture for picture, _ in pictures]], return_tensors="pt")["pixel_values"]
    for (picture, image_ref), expected in zip(pictures, several, strict=True):
        assert (image_ref.num_patches, image_ref.num_tokens) == (1, 5)
        tiles, size = found.patches_of(picture, image_ref)
        assert torch.equal(tiles, expected)
        assert size == image_ref.size
