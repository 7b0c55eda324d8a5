"""Towers that read patches in rows, against a model with one."""

import pytest
import torch
from tiny_models import tiny_vision_model

from shardwise.families import backbone, tower_of
from shardwise.types import Images


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_merged_patches_are_tokens(family):
    model = tiny_vision_model(family)
    tower = tower_of(model.config)
    grids = torch.tensor([[1, 4, 6], [1, 2, 2]])
    num_patches = grids.prod(1)
    patches = torch.randn(int(num_patches.sum()), tower.num_values)
    images = Images(pixel_values=patches, num_patches=num_patches, num_tokens=num_patches, sizes=grids)
    with torch.no_grad():
        features = backbone(model).get_image_features(**tower.arguments(images), return_dict=True).pooler_output
    assert [len(feature) for feature in features] == [tower.num_tokens(count) for count in num_patches.tolist()]
