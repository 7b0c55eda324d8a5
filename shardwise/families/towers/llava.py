"""The towers of LLaVA and LLaVA-NeXT."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from shardwise.families.towers.base import one_image
from shardwise.families.towers.tiles import TileTower
from shardwise.types import Images


@dataclass(frozen=True, slots=True)
class LlavaTower(TileTower):
    """Reads a picture as one tile: CLIP or SigLIP."""

    @classmethod
    def of(cls, config: Any) -> Self:
        """`config`: of the whole model. CLIP has a feature more than patches."""
        vision = config.vision_config
        num_features = (vision.image_size // vision.patch_size) ** 2 + (vision.model_type == "clip_vision_model")
        return cls(
            num_channels=vision.num_channels,
            height=vision.image_size,
            width=vision.image_size,
            tokens_per_tile=num_features - (config.vision_feature_select_strategy == "default"),
        )


@dataclass(frozen=True, slots=True)
class LlavaNextTower:
    """Reads a picture as one tile and again in several, of whose features those of padding are left out: how many
    tokens stand for it depends on its proportions. `Images` are as with TileTower."""

    tiles: LlavaTower
    pinpoints: Sequence[tuple[int, int]]
    """Heights and widths in pixels that the tiles of a picture may have together."""
    sees_all_patches: ClassVar[bool] = False

    @classmethod
    def of(cls, config: Any) -> Self:
        """`config`: of the whole model."""
        return cls(tiles=LlavaTower.of(config), pinpoints=[tuple(size) for size in config.image_grid_pinpoints])

    def num_patches(self, pinpoint: tuple[int, int]) -> int:
        """Returns how many tiles a picture has for which `pinpoint` is taken."""
        return 1 + pinpoint[0] // self.tiles.height * (pinpoint[1] // self.tiles.width)

    def num_tokens(self, pinpoint: tuple[int, int], size: Sequence[int]) -> int:
        """Returns how many tokens stand for a picture of `size` for which `pinpoint` is taken: those of the whole tile,
        and of the others without padding, with one more at the end of each row."""
        side = round(self.tiles.tokens_per_tile**0.5)  # of a tile, in features
        rows, columns = pinpoint[0] // self.tiles.height * side, pinpoint[1] // self.tiles.width * side
        height, width = size
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return self.tiles.tokens_per_tile + rows * (columns + 1)

    def arguments(self, images: Images) -> dict[str, Any]:
        """See Tower."""
        return {"pixel_values": images.pixel_values, "image_sizes": images.sizes.tolist()}

    def black(self) -> Images:
        """See Tower."""
        pinpoint = min(self.pinpoints, key=self.num_patches)
        tiles = self.tiles.black().pixel_values.expand(self.num_patches(pinpoint), -1, -1, -1)
        return one_image(tiles, num_tokens=self.num_tokens(pinpoint, pinpoint), size=list(pinpoint))
