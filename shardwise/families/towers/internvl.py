"""The tower of InternVL."""

from dataclasses import dataclass
from typing import Any, Self

from shardwise.families.towers.tiles import TileTower


@dataclass(frozen=True, slots=True)
class InternVLTower(TileTower):
    """Reads several tiles of a picture, and a thumbnail of it behind them."""

    @classmethod
    def of(cls, config: Any) -> Self:
        """`config`: of the whole model."""
        vision = config.vision_config
        height, width = vision.image_size
        patches = (height // vision.patch_size[0]) * (width // vision.patch_size[1])
        return cls(
            num_channels=vision.num_channels,
            height=height,
            width=width,
            tokens_per_tile=int(patches * config.downsample_ratio**2),
        )
