"""What is made of pictures, against the models' own image processors."""

import pytest
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    Glm4vImageProcessorPil,
    Glm46VImageProcessorPil,
    Qwen2VLImageProcessorPil,
)

from shardwise.data.image_processors import GridProcessor, image_processor_for
from shardwise.families import GridTower

SMALL_AND_LARGE = [(16, 8), (24, 24), (20, 36), (5, 3), (3, 40), (1, 1), (64, 48), (100, 30)]


TINY = {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 4096}}


@pytest.mark.parametrize("kind", [Qwen2VLImageProcessorPil, Glm4vImageProcessorPil, Glm46VImageProcessorPil])
@pytest.mark.parametrize(("options", "sizes"), [(TINY, SMALL_AND_LARGE), ({}, [(30, 20), (644, 483), (1700, 1200)])])
def test_grids_and_patches_are_those_of_the_families_own_processors(kind, options, sizes):
    """GLM's limits hold for the pixels of two frames, and it scales small images up to a patch first."""
    processor = kind(**options)
    found = image_processor_for(GridTower(merge_size=2, num_values=96), processor)
    assert isinstance(found, GridProcessor)
    for size in sizes:
        picture = Image.effect_noise(size, 90).convert("RGB")
        expected = processor([picture], return_tensors="pt")
        grid = expected["image_grid_thw"][0].tolist()
        assert found.measure(*size) == (processor.get_number_of_image_patches(*size[::-1]), grid)
        pixels, measured = found.cut(picture)
        assert torch.equal(pixels, expected["pixel_values"])
        assert measured == grid


def test_a_processor_of_another_kind_prepares_no_grids():
    assert image_processor_for(GridTower(merge_size=2, num_values=96), CLIPImageProcessorPil()) is None
