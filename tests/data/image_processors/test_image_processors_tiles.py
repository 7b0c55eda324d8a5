"""The size of tiles."""

import pytest
from transformers import CLIPImageProcessorPil, GotOcr2ImageProcessorPil

from shardwise.config import ModelError
from shardwise.data.image_processors.tiles import require_tile_size
from shardwise.families import LlavaTower

TOWER = LlavaTower(num_channels=3, height=16, width=16, tokens_per_tile=4)
SQUARE = {"height": 16, "width": 16}


def test_tiles_of_another_size_than_the_towers_are_refused_with_both():
    tiles = "makes tiles of "
    with pytest.raises(ModelError) as error:
        require_tile_size(GotOcr2ImageProcessorPil(), TOWER)
    assert f"{tiles}size={SQUARE | {'height': 384, 'width': 384}}, and the vision tower reads {SQUARE}" in str(
        error.value
    )
    with pytest.raises(ModelError) as error:
        require_tile_size(CLIPImageProcessorPil(), TOWER)
    assert f"{tiles}crop_size={SQUARE | {'height': 224, 'width': 224}}, and" in str(error.value)
    with pytest.raises(ModelError) as error:
        require_tile_size(CLIPImageProcessorPil(do_center_crop=False), TOWER)
    assert f"{tiles}size={{'shortest_edge': 224}}, and" in str(error.value)
