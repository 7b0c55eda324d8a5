"""Tiles and tokens of Idefics 3 and SmolVLM, against the models themselves."""

import pytest
import torch
from tiny_models import tiny_vision_model
from transformers import Idefics3Config

from shardwise.families import Idefics3Tower, backbone, tower_of
from shardwise.types import Images


@pytest.mark.parametrize(
    ("pixels", "patch", "factor", "expected"), [(364, 14, 2, 169), (384, 14, 3, 81), (512, 16, 4, 64)]
)
def test_tokens_of_a_tile_are_those_of_published_models(pixels, patch, factor, expected):
    config = Idefics3Config(vision_config={"image_size": pixels, "patch_size": patch}, scale_factor=factor)
    assert tower_of(config) == Idefics3Tower(num_channels=3, height=pixels, width=pixels, tokens_per_tile=expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_a_black_tile_is_seen_like_any_other(family, dtype):
    """The model itself takes it for padding, and would have too few features."""
    model = tiny_vision_model(family).to(dtype)
    tower = tower_of(model.config)
    tiles = torch.randn(3, 3, 16, 16)
    tiles[1] = 0
    counts = torch.tensor([1, 2])
    images = Images(
        pixel_values=tiles, num_patches=counts, num_tokens=4 * counts, sizes=torch.tensor([[9, 9], [9, 18]])
    )
    whole = backbone(model)
    with torch.no_grad():
        (features,) = whole.get_image_features(**tower.arguments(images), return_dict=True).pooler_output
        seen = whole.vision_model(pixel_values=tiles.to(dtype), return_dict=True).last_hidden_state
        expected = whole.connector(seen).flatten(0, 1)
    assert len(features) == tower.num_tokens(3)
    torch.testing.assert_close(features, expected)
    assert not images.pixel_values[1].any()
