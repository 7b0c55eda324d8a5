"""The towers of LLaVA, LLaVA-NeXT and LLaVA-OneVision."""

import math
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
    follows_first_parameter: ClassVar[bool] = False

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
        rows, columns = self._unpadded(pinpoint, size)
        return self.tiles.tokens_per_tile + rows * (columns + 1)

    def _unpadded(self, pinpoint: tuple[int, int], size: Sequence[int]) -> tuple[int, int]:
        """Returns the rows and columns of the features of the several tiles without padding."""
        side = self._side
        rows, columns = pinpoint[0] // self.tiles.height * side, pinpoint[1] // self.tiles.width * side
        height, width = size
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return rows, columns

    @property
    def _side(self) -> int:
        """Rows, and columns, of the features of a tile."""
        return round(self.tiles.tokens_per_tile**0.5)

    def arguments(self, images: Images) -> dict[str, Any]:
        """See Tower."""
        return {"pixel_values": images.pixel_values, "image_sizes": images.sizes.tolist()}

    def black(self) -> Images:
        """See Tower."""
        pinpoint = min(self.pinpoints, key=self.num_patches)
        tiles = self.tiles.black().pixel_values.expand(self.num_patches(pinpoint), -1, -1, -1)
        return one_image(tiles, num_tokens=self.num_tokens(pinpoint, pinpoint), size=list(pinpoint))


class _Several:
    """How many images a conversation has, of which one is here: any number but 1, by which transformers counts on."""

    def __index__(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class LlavaOnevisionTower(LlavaNextTower):
    """As LLaVA-NeXT, but that features of more tiles than `max_tiles` are scaled down, and that a picture with others
    in its conversation is one tile alone."""

    max_tiles: int

    @classmethod
    def of(cls, config: Any) -> Self:
        """`config`: of the whole model, whose `vision_aspect_ratio` is "anyres_max_9" or has another number."""
        return cls(
            tiles=LlavaTower.of(config),
            pinpoints=[tuple(size) for size in config.image_grid_pinpoints],
            max_tiles=int(config.vision_aspect_ratio.removeprefix("anyres_max_")),
        )

    @property
    def num_tokens_beside_others(self) -> int:
        """How many tokens stand for a picture that is one tile alone, with one more at its end."""
        return self.tiles.tokens_per_tile + 1

    def arguments(self, images: Images) -> dict[str, Any]:
        """See Tower."""
        counts = [_Several() if num_tiles == 1 else 1 for num_tiles in images.num_patches.tolist()]
        return LlavaNextTower.arguments(self, images) | {"batch_num_images": counts}

    def black(self) -> Images:
        """See Tower."""
        tiles = self.tiles
        return one_image(
            tiles.black().pixel_values, num_tokens=self.num_tokens_beside_others, size=[tiles.height, tiles.width]
        )

    def _unpadded(self, pinpoint: tuple[int, int], size: Sequence[int]) -> tuple[int, int]:
        """See LlavaNextTower; scaled as transformers' LlavaOnevisionModel does."""
        rows, columns = LlavaNextTower._unpadded(self, pinpoint, size)
        ratio = math.sqrt(rows * columns / (self.max_tiles * self._side**2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)
