"""Grids of patches, against the image processors of Qwen and GLM."""

import pytest
import torch
from PIL import Image
from transformers import Glm4vImageProcessorPil, Glm46VImageProcessorPil, Qwen2VLImageProcessorPil

from shardwise.data.image_processors import Extent, GridProcessor, image_processor_for
from shardwise.families import GridTower

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
