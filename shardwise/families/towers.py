"""How models are given images: what their vision towers read, and how many tokens they make of it.

Shapes: I images, N patches of all of them, F values of a patch.
"""

from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from shardwise.types import Images

VISION_CONFIG = "vision_config"
_GRID_SIZES = ("spatial_merge_size", "in_channels", "temporal_patch_size", "patch_size")
"""What the config of a tower says that is given grids."""


class Tower(Protocol):
    """What the config of a model says about its vision tower."""

    def num_tokens(self, num_patches: int) -> int:
        """Returns how many tokens stand for an image of so many patches."""
        ...

    def arguments(self, images: Images) -> dict[str, Tensor]:
        """Returns what the model's get_image_features takes."""
        ...

    def black(self) -> Images:
        """Returns the smallest image that the tower takes, in black."""
        ...


@dataclass(frozen=True, slots=True)
class GridTower:
    """A tower that reads the patches of all images in one row, and the grid of each: those of Qwen and GLM."""

    merge_size: int
    """Patches that are merged in height, and in width, into one token."""
    num_values: int
    """F."""

    @classmethod
    def of(cls, vision: Any) -> Self:
        """`vision`: the config of the tower."""
        return cls(
            merge_size=vision.spatial_merge_size,
            num_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        )

    def num_tokens(self, num_patches: int) -> int:
        """See Tower."""
        return num_patches // self.merge_size**2

    def arguments(self, images: Images) -> dict[str, Tensor]:
        """See Tower."""
        return {"pixel_values": images.pixel_values, "image_grid_thw": images.sizes}

    def black(self) -> Images:
        """See Tower."""
        grid = [1, self.merge_size, self.merge_size]
        return _image(torch.zeros(self.merge_size**2, self.num_values), num_tokens=1, size=grid)


def tower_of(config: Any) -> Tower | None:
    """Returns the vision tower of a model with this config; None if it has none, or one of another kind."""
    vision = getattr(config, VISION_CONFIG, None)
    if all(hasattr(vision, name) for name in _GRID_SIZES):
        return GridTower.of(vision)
    return None


def _image(patches: Tensor, *, num_tokens: int, size: list[int]) -> Images:
    """A single one."""
    return Images(
        pixel_values=patches,
        num_patches=torch.tensor([len(patches)]),
        num_tokens=torch.tensor([num_tokens]),
        sizes=torch.tensor([size]),
    )
