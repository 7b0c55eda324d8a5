"""What towers that read tiles of one size have in common."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shardwise.families.towers.base import one_image
from shardwise.types import Images


@dataclass(frozen=True, slots=True)
class TileTower:
    """A tower that makes as many tokens of every tile. `Images` hold tiles for patches, and as sizes the height and
    width of the pictures in pixels."""

    num_channels: int
    height: int
    """Of a tile, in pixels."""
    width: int
    tokens_per_tile: int
    sees_all_patches: ClassVar[bool] = False
    follows_first_parameter: ClassVar[bool] = False

    def num_tokens(self, num_patches: int) -> int:
        """Returns how many tokens stand for an image of so many tiles."""
        return num_patches * self.tokens_per_tile

    def arguments(self, images: Images) -> dict[str, Any]:
        """See Tower."""
        return {"pixel_values": images.pixel_values}

    def black(self) -> Images:
        """See Tower."""
        tile = torch.zeros(1, self.num_channels, self.height, self.width)
        return one_image(tile, num_tokens=self.tokens_per_tile, size=[self.height, self.width])
