"""What the tower of Pixtral is given."""

import torch
from vision_samples import padded

from shardwise.families import PixtralTower
from shardwise.types import Images


def test_pixtral_is_given_its_pictures_padded_to_the_largest():
    tower = PixtralTower(patch_size=4, merge_size=2, num_channels=3, min_tokens=2)
    sizes = torch.tensor([[8, 24], [16, 8]])
    num_patches = sizes.prod(1) // 16
    images = Images(
        pixel_values=torch.randn(int(num_patches.sum()), 48),
        num_patches=num_patches,
        num_tokens=num_patches // 4,
        sizes=sizes,
    )
    given = tower.arguments(images)
    assert given["image_sizes"] == sizes.tolist()
    assert torch.equal(given["pixel_values"], padded(images))
    assert given["pixel_values"].shape == (2, 3, 16, 24)
