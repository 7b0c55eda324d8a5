"""Tiles and their marks, against the image processor of LFM2-VL, which needs torchvision (`make test-vllm`)."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from vision_folders import CUT, tokenizer_with_images

from shardwise.config import ModelError
from shardwise.data import ImageReader
from shardwise.data.image_processors import Extent, Lfm2VlProcessor, image_processor_for
from shardwise.data.image_tokens import ImageTokens
from shardwise.families import Lfm2VlTower
from shardwise.families.towers.lfm2_vl import tile_shapes
from shardwise.types import ImageRef

TOWER = Lfm2VlTower(patch_size=4, merge_size=2, num_channels=3)
TINY = {"encoder_patch_size": 4, "tile_size": 16, "min_image_tokens": 2, "max_image_tokens": 6, "max_tiles": 6}
SIZES = [(16, 8), (24, 24), (20, 36), (3, 40), (64, 48), (100, 30), (30, 100), (31, 33), (1, 1)]


@pytest.fixture(scope="module", autouse=True)
def torchvision():
    return pytest.importorskip("torchvision")


def own_processor(**options):
    from transformers import Lfm2VlImageProcessor

    return Lfm2VlImageProcessor(**TINY | options)


OPTIONS = [{}, {"use_thumbnail": False}, {"do_image_splitting": False}, {"min_tiles": 3}, {"max_pixels_tolerance": 1.0}]


@pytest.mark.parametrize("options", OPTIONS)
def test_lfm2_vls_tiles_are_those_of_its_own_processor(options):
    processor = own_processor(**options)
    found = image_processor_for(TOWER, processor)
    assert isinstance(found, Lfm2VlProcessor)
    num_cut = 0
    for width, height in SIZES:
        picture = Image.effect_noise((width, height), 90).convert("RGB")
        expected = processor([picture], return_row_col_info=True, return_tensors="pt")
        patches, size = found.cut(picture)
        extent = found.measure(width, height)
        assert extent == Extent(len(patches), len(patches) // 4, size)
        assert size[:2] == [expected["image_rows"][0], expected["image_cols"][0]]
        shapes = expected["spatial_shapes"].tolist()
        assert tile_shapes(size, len(patches)) == shapes
        own = [tile[: height * width] for tile, (height, width) in zip(expected["pixel_values"], shapes, strict=True)]
        assert torch.equal(patches, torch.cat(own))
        num_cut += len(shapes) > 1
    assert (num_cut > 2) == ("do_image_splitting" not in options)


@pytest.mark.parametrize("options", OPTIONS)
def test_marks_of_lfm2_vls_tiles_are_those_of_its_own_processor(options, tmp_path):
    from transformers import Lfm2VlProcessor as OwnProcessor

    tokenizer = tokenizer_with_images(CUT, "<image>")
    processor = OwnProcessor(own_processor(**options), tokenizer)
    tokens = ImageTokens(tmp_path, tokenizer, tokenizer.convert_tokens_to_ids("<image>"))
    pictures = image_processor_for(TOWER, processor.image_processor)
    for width, height in SIZES:
        picture = Image.effect_noise((width, height), 90).convert("RGB")
        expected = processor(text=["a <image> b"], images=[picture])["input_ids"][0]
        extent = pictures.measure(width, height)
        image_ref = ImageRef(
            name="?", path="?", num_patches=extent.num_patches, num_tokens=extent.num_tokens, size=extent.size
        )
        found = pictures.placeholder(image_ref, tokens)
        assert [*tokenizer.encode("a "), *found, *tokenizer.encode(" b")] == expected
        assert found.count(tokens.image_id) == extent.num_tokens


def test_a_processor_of_lfm2_vl_that_does_not_fit_its_tower_is_refused():
    for tower, options, reason in (
        (replace(TOWER, patch_size=16), {}, "encoder_patch_size=4 of the image processor is not the 16 of config"),
        (replace(TOWER, merge_size=1), {}, "downsample_factor=2 of the image processor is not the 1 of config"),
        (TOWER, {"tile_size": 20}, "tile_size=20 of the image processor is no multiple of the 8 pixels of a token"),
        (TOWER, {"min_tiles": 1}, "min_tiles=1 of the image processor: it would make one square of a large pict"),
    ):
        with pytest.raises(ModelError, match=reason):
            image_processor_for(tower, own_processor(**options))


def test_the_processor_of_lfm2_vl_is_read_from_its_folder(tmp_path):
    from tiny_models import tiny_vision_model

    tiny_vision_model("lfm2_vl").config.save_pretrained(tmp_path)
    settings = TINY | {"image_processor_type": "Lfm2VlImageProcessorFast"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    reader = ImageReader.load(tmp_path)
    pictures = [Image.effect_noise(size, 90).convert("RGB") for size in SIZES]
    image_refs = [reader.open(picture, tmp_path, "it") for picture in pictures]
    read = reader.read(image_refs)
    expected = own_processor()(pictures, return_tensors="pt")
    assert torch.equal(read.pixel_values, expected["pixel_values"][expected["pixel_attention_mask"].bool()])
    assert int(read.num_tokens.sum()) * 4 == len(read.pixel_values)
