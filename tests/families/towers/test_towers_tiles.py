"""Towers that read tiles, against a model with one."""

import pytest
import torch
from tiny_models import tiny_vision_model

from shardwise.families import backbone, tower_of
from shardwise.types import Images


@pytest.mark.parametrize("family", ["internvl", "llava", "gemma3"])
def test_every_tile_is_as_many_tokens(family):
    model = tiny_vision_model(family)
    tower = tower_of(model.config)
    tiles = torch.randn(3, tower.num_channels, tower.height, tower.width)
    counts = torch.tensor([1, 2])
    images = Images(pixel_values=tiles, num_patches=counts, num_tokens=counts, sizes=torch.tensor([[8, 8], [8, 16]]))
    with torch.no_grad():
        features = backbone(model).get_image_features(**tower.arguments(images), return_dict=True).pooler_output
    assert [len(feature) for feature in features] == [tower.tokens_per_tile] * 3
    assert tower.num_tokens(3) == 3 * tower.tokens_per_tile
