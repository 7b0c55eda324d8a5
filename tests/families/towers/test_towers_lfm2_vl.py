"""What the tower of LFM2-VL is given, and what of it is reached."""

import pytest
import torch
from tiny_models import tiny_vision_model
from transformers import Lfm2VlForConditionalGeneration
from vision_samples import padded_tiles

from shardwise.families import backbone, tower_of, unreached_modules
from shardwise.types import Images

SIZES = [[2, 3, 4, 2, 6], [1, 1, 4, 6, 2], [1, 2, 4, 8, 2], [1, 2, 4, 2, 2]]
"""Squares with the whole picture behind them, a whole picture, and squares with a whole picture and without."""
NUM_PATCHES = [6 * 16 + 12, 12, 2 * 16 + 16, 2 * 16]


def drawn() -> Images:
    counts = torch.tensor(NUM_PATCHES)
    patches = torch.randn(int(counts.sum()), 48, generator=torch.Generator().manual_seed(0))
    return Images(pixel_values=patches, num_patches=counts, num_tokens=counts // 4, sizes=torch.tensor(SIZES))


def test_lfm2_vl_is_given_its_tiles_padded_to_the_largest():
    images = drawn()
    given, expected = tower_of(tiny_vision_model("lfm2_vl").config).arguments(images), padded_tiles(images)
    assert given["pixel_values"].shape == (7 + 1 + 3 + 2, 16, 48)
    assert torch.equal(given["spatial_shapes"], expected["spatial_shapes"])
    for name in ("pixel_values", "pixel_attention_mask"):
        assert torch.equal(given[name], expected[name][:, :16])
        assert not expected[name][:, 16:].any()


def test_tiles_of_lfm2_vl_are_seen_as_alone_whatever_they_are_padded_to():
    model = tiny_vision_model("lfm2_vl")
    tower, images = tower_of(model.config), drawn()

    def features(seen: Images) -> torch.Tensor:
        with torch.no_grad():
            output = backbone(model).get_image_features(**tower.arguments(seen), return_dict=True)
        return torch.cat(list(output.pooler_output))

    together = features(images).split(images.num_tokens.tolist())
    patches = images.pixel_values.split(NUM_PATCHES)
    for at, found in enumerate(together):
        own = slice(at, at + 1)
        alone = Images(
            pixel_values=patches[at],
            num_patches=images.num_patches[own],
            num_tokens=images.num_tokens[own],
            sizes=images.sizes[own],
        )
        torch.testing.assert_close(found, features(alone), atol=1e-5, rtol=1e-5)
        assert len(found) == tower.num_tokens(NUM_PATCHES[at])


@pytest.mark.parametrize("has_head", [True, False])
def test_the_pooling_head_of_lfm2_vl_is_not_reached(has_head):
    config = tiny_vision_model("lfm2_vl").config
    config.vision_config.vision_use_head = has_head
    model = Lfm2VlForConditionalGeneration(config)
    tower = tower_of(config)
    output = backbone(model).get_image_features(**tower.arguments(tower.black()), return_dict=True)
    sum(feature.sum() for feature in output.pooler_output).backward()
    assert unreached_modules(model) == (["model.vision_tower.head"] if has_head else [])
    for path, parameter in model.model.vision_tower.named_parameters():
        assert (parameter.grad is None) == path.startswith("head."), path
