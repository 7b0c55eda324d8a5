"""What is made of pictures, against the models' own image processors."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    Glm4vImageProcessorPil,
    Glm46VImageProcessorPil,
    GotOcr2ImageProcessorPil,
    LlavaImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    PixtralImageProcessorPil,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
)

from shardwise.config import ModelError
from shardwise.data.image_processors import (
    AnyresProcessor,
    Extent,
    GridProcessor,
    PixtralProcessor,
    TileProcessor,
    image_processor_for,
    read_keys,
)
from shardwise.families import AnyresTower, GridTower, PixtralTower, TileTower

SMALL_AND_LARGE = [(16, 8), (24, 24), (20, 36), (5, 3), (3, 40), (1, 1), (64, 48), (100, 30)]


TINY = {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 4096}}


@pytest.mark.parametrize("kind", [Qwen2VLImageProcessorPil, Glm4vImageProcessorPil, Glm46VImageProcessorPil])
@pytest.mark.parametrize(("options", "sizes"), [(TINY, SMALL_AND_LARGE), ({}, [(30, 20), (644, 483), (1700, 1200)])])
def test_grids_and_patches_are_those_of_the_families_own_processors(kind, options, sizes):
    """GLM's limits hold for the pixels of two frames, and it scales small images up to a patch first."""
    processor = kind(**options)
    tower = GridTower(merge_size=2, num_values=96)
    found = image_processor_for(tower, processor)
    assert isinstance(found, GridProcessor)
    for size in sizes:
        picture = Image.effect_noise(size, 90).convert("RGB")
        expected = processor([picture], return_tensors="pt")
        grid = expected["image_grid_thw"][0].tolist()
        num_patches = processor.get_number_of_image_patches(*size[::-1])
        assert found.measure(*size) == Extent(num_patches, num_patches // 4, grid)
        pixels, measured = found.cut(picture)
        assert torch.equal(pixels, expected["pixel_values"])
        assert measured == grid


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


TILES = TileTower(num_channels=3, height=16, width=16, tokens_per_tile=4, is_cut=True)
ONE_TILE = replace(TILES, is_cut=False)
SQUARE = {"height": 16, "width": 16}


@pytest.mark.parametrize("options", [{"crop_to_patches": False, "max_patches": 6}, {"min_patches": 2}])
def test_internvls_tiles_are_those_of_its_own_processor(options):
    """Which cuts pictures whatever its file says."""
    processor = GotOcr2ImageProcessorPil(size=SQUARE, **options)
    found = image_processor_for(TILES, processor)
    assert isinstance(found, TileProcessor)
    for width, height in [(16, 8), (24, 24), (20, 36), (3, 40), (64, 48), (100, 30)]:
        picture = Image.effect_noise((width, height), 90).convert("RGB")
        expected = processor([picture], crop_to_patches=True, return_tensors="pt")["pixel_values"]
        tiles, size = found.cut(picture)
        assert torch.equal(tiles, expected)
        assert size == [height, width]
        assert found.measure(width, height) == Extent(len(tiles), 4 * len(tiles), size)


def test_tiles_of_another_size_than_the_towers_are_refused_with_both():
    tiles = "makes tiles of "
    with pytest.raises(ModelError) as error:
        image_processor_for(TILES, GotOcr2ImageProcessorPil())
    assert f"{tiles}size={SQUARE | {'height': 384, 'width': 384}}, and the vision tower reads {SQUARE}" in str(
        error.value
    )
    with pytest.raises(ModelError) as error:
        image_processor_for(ONE_TILE, CLIPImageProcessorPil())
    assert f"{tiles}crop_size={SQUARE | {'height': 224, 'width': 224}}, and" in str(error.value)
    with pytest.raises(ModelError) as error:
        image_processor_for(ONE_TILE, CLIPImageProcessorPil(do_center_crop=False))
    assert f"{tiles}size={{'shortest_edge': 224}}, and" in str(error.value)


@pytest.mark.parametrize(
    "processor",
    [
        CLIPImageProcessorPil(size={"shortest_edge": 20}, crop_size=SQUARE),
        LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size=SQUARE, do_pad=True),
        SiglipImageProcessorPil(size=SQUARE),
    ],
)
def test_llavas_one_tile_is_that_of_its_own_processor(processor):
    found = image_processor_for(ONE_TILE, processor)
    for width, height in [(16, 8), (24, 24), (3, 40), (64, 48)]:
        picture = Image.effect_noise((width, height), 90).convert("RGB")
        tiles, size = found.cut(picture)
        assert torch.equal(tiles, processor([picture], return_tensors="pt")["pixel_values"])
        assert tiles.shape == (1, 3, 16, 16)
        assert found.measure(width, height) == Extent(1, 4, size)
        assert size == [height, width]


PINPOINTS = [[16, 32], [32, 16], [32, 32], [48, 16]]
ANYRES = AnyresTower(tiles=ONE_TILE, pinpoints=[tuple(size) for size in PINPOINTS])


def test_llava_nexts_tiles_are_those_of_its_own_processor():
    processor = LlavaNextImageProcessorPil(size={"shortest_edge": 16}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS)
    found = image_processor_for(ANYRES, processor)
    assert isinstance(found, AnyresProcessor)
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
            ANYRES, LlavaNextImageProcessorPil(size=SQUARE, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS[:1])
        )


@pytest.mark.parametrize("tower", [GridTower(merge_size=2, num_values=96), PIXTRAL, TILES, ANYRES])
def test_a_processor_of_another_kind_is_refused_with_those_that_are_read(tower):
    with pytest.raises(ModelError, match=r"the image processor is CLIPImageProcessorPil, and .* prepared by \w+Image"):
        image_processor_for(tower, CLIPImageProcessorPil())
    with pytest.raises(ModelError, match=r"by CLIPImageProcessor or SiglipImageProcessor or LlavaImageProcessor; take"):
        image_processor_for(ONE_TILE, GotOcr2ImageProcessorPil(size=SQUARE))


def test_keys_of_a_file_that_is_not_there_are_none(tmp_path):
    assert read_keys(tmp_path / "processor_config.json", "image_processor") == {}
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"merge_size": 2}}')
    assert read_keys(tmp_path / "processor_config.json", "image_processor") == {"merge_size": 2}
    (tmp_path / "processor_config.json").write_text("7")
    with pytest.raises(ModelError, match=r"processor_config\.json cannot be read: it holds a number instead of keys"):
        read_keys(tmp_path / "processor_config.json")
