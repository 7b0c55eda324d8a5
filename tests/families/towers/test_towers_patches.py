"""Towers that merge patches into tokens, against models with one."""

import pytest
import torch
from tiny_models import tiny_vision_model

from shardwise.families import backbone, tower_of
from shardwise.types import Images


@pytest.mark.parametrize("family", ["mistral3", "gemma4"])
def test_a_picture_is_as_many_tokens_as_its_sides_have_of_their_size(family):
    model = tiny_vision_model(family)
    tower = tower_of(model.config)
    height, width = 3 * tower.token_size, 2 * tower.token_size
    num_patches = height * width // tower.patch_size**2
    images = Images(
        pixel_values=torch.randn(num_patches, 3 * tower.patch_size**2),
        num_patches=torch.tensor([num_patches]),
        num_tokens=torch.tensor([6]),
        sizes=torch.tensor([[height, width]]),
    )
    with torch.no_grad():
        features = backbone(model).get_image_features(**tower.arguments(images), return_dict=True).pooler_output
    assert sum(map(len, features)) == tower.num_tokens(num_patches) == 6
