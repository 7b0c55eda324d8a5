"""The tower of Gemma 3."""

from dataclasses import dataclass
from typing import Any, Self

from shardwise.families.towers.tiles import TileTower


@dataclass(frozen=True, slots=True)
class Gemma3Tower(TileTower):
    """Reads a picture as one tile: SigLIP, whose features a projector pools."""

    @classmethod
    def of(cls, config: Any) -> Self:
        """`config`: of the whole model."""
        vision = config.vision_config
        return cls(
            num_channels=vision.num_channels,
            height=vision.image_size,
            width=vision.image_size,
            tokens_per_tile=config.mm_tokens_per_image,
        )
