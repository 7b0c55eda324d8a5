"""The tower of Idefics 3 and SmolVLM."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from shardwise.families.towers.tiles import TileTower
from shardwise.types import Images

_SMALLEST = 2.0**-24
"""The smallest float16 above 0."""


@dataclass(frozen=True, slots=True)
class Idefics3Tower(TileTower):
    """Reads several tiles of a picture, and all of it in one more behind them; or a picture as one tile."""

    follows_first_parameter: ClassVar[bool] = True

    @classmethod
    def of(cls, config: Any) -> Self:
        """`config`: of the whole model."""
        vision = config.vision_config
        num_patches = (vision.image_size // vision.patch_size) ** 2
        return cls(
            num_channels=vision.num_channels,
            height=vision.image_size,
            width=vision.image_size,
            tokens_per_tile=num_patches // config.scale_factor**2,
        )

    def arguments(self, images: Images) -> dict[str, Any]:
        """See Tower. A tile of zeros would be left out as padding: one value of it becomes the smallest there is."""
        tiles = images.pixel_values.flatten(1).clone()
        tiles[:, 0] += _SMALLEST * ~tiles.any(1)
        return {"pixel_values": tiles.view_as(images.pixel_values)[None]}
