"""What all image processors have in common, and which of them is taken."""

import pytest
from transformers import CLIPImageProcessorPil, GotOcr2ImageProcessorPil, Qwen2VLImageProcessorPil

from shardwise.config import ModelError
from shardwise.data.image_processors import image_processor_for
from shardwise.data.image_tokens import ImageTokens
from shardwise.families import GridTower, InternVLTower, LlavaNextTower, LlavaTower, PixtralTower
from shardwise.types import ImageRef

GRID = GridTower(merge_size=2, num_values=96)
TILE = {"num_channels": 3, "height": 16, "width": 16, "tokens_per_tile": 4}
TOWERS = [
    GRID,
    PixtralTower(patch_size=4, merge_size=2, num_channels=3, min_tokens=2),
    InternVLTower(**TILE),
    LlavaNextTower(tiles=LlavaTower(**TILE), pinpoints=[(16, 32)]),
]


@pytest.mark.parametrize("tower", TOWERS)
def test_a_processor_of_another_kind_is_refused_with_those_that_are_read(tower):
    with pytest.raises(ModelError, match=r"the image processor is CLIPImageProcessorPil, and .* prepared by \w+Image"):
        image_processor_for(tower, CLIPImageProcessorPil())
    with pytest.raises(ModelError, match=r"by CLIPImageProcessor or SiglipImageProcessor or LlavaImageProcessor; take"):
        image_processor_for(LlavaTower(**TILE), GotOcr2ImageProcessorPil())


def test_an_image_without_marks_is_one_token_again_and_again(tmp_path):
    image_ref = ImageRef(name="?", path="?", num_patches=20, num_tokens=5, size=[1, 2, 10])
    processor = image_processor_for(GRID, Qwen2VLImageProcessorPil())
    assert processor.placeholder(image_ref, ImageTokens(tmp_path, None, 7)) == [7] * 5


def test_settings_are_what_the_processor_was_made_with():
    """But not which class of transformers takes it along, which depends on the release that wrote the file."""
    found = image_processor_for(GRID, Qwen2VLImageProcessorPil(patch_size=4, processor_class="Qwen2VLProcessor"))
    assert found.settings["patch_size"] == 4
    assert "processor_class" not in found.settings
    assert None not in found.settings.values()
