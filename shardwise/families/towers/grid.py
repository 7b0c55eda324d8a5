"""The towers of Qwen and GLM."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from shardwise.families.towers.base import one_image
from shardwise.types import Images
from shardwise.uploads import to_device


@dataclass(frozen=True, slots=True)
class GridTower:
    """A tower that reads the patches of all images in one row, and the grid of each: those of Qwen and GLM."""

    merge_size: int
    """Patches that are merged in height, and in width, into one token."""
    num_values: int
    """F."""

    sees_all_patches: ClassVar[bool] = False
    follows_first_parameter: ClassVar[bool] = False

    @classmethod
    def of(cls, vision: Any) -> Self:
        """`vision`: the config of the tower."""
        return cls(
            merge_size=vision.spatial_merge_size,
            num_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        )

    def num_tokens(self, num_patches: int) -> int:
        """Returns how many tokens stand for an image of so many patches."""
        return num_patches // self.merge_size**2

    def arguments(self, images: Images) -> dict[str, Any]:
        """See Tower."""
        grids = to_device(images.sizes, images.pixel_values.device)
        return {"pixel_values": images.pixel_values, "image_grid_thw": grids}

    def black(self) -> Images:
        """See Tower."""
        grid = [1, self.merge_size, self.merge_size]
        return one_image(torch.zeros(self.merge_size**2, self.num_values), num_tokens=1, size=grid)
