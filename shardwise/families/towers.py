"""How models are given images: what their vision towers read, and how many tokens they make of it.

Shapes: I images, N patches of all of them, F values of a patch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import fold, pad

from shardwise.types import Images

VISION_CONFIG = "vision_config"
_GRID_SIZES = ("spatial_merge_size", "in_channels", "temporal_patch_size", "patch_size")
"""What the config of a tower says that is given grids."""


class Tower(Protocol):
    """What the config of a model says about its vision tower."""

    def arguments(self, images: Images) -> dict[str, Any]:
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
        """Returns how many tokens stand for an image of so many patches."""
        return num_patches // self.merge_size**2

    def arguments(self, images: Images) -> dict[str, Any]:
        """See Tower."""
        return {"pixel_values": images.pixel_values, "image_grid_thw": images.sizes}

    def black(self) -> Images:
        """See Tower."""
        grid = [1, self.merge_size, self.merge_size]
        return _image(torch.zeros(self.merge_size**2, self.num_values), num_tokens=1, size=grid)


@dataclass(frozen=True, slots=True)
class PixtralTower:
    """Pixtral, which reads whole pictures of all sizes, padded to the largest of them. `Images` hold their patches, and
    as sizes their height and width in pixels."""

    patch_size: int
    """Pixels of a patch in height, and in width."""
    merge_size: int
    """Patches that are merged in height, and in width, into one token."""
    num_channels: int
    min_tokens: int
    """That an image has at least: 2 in Mistral 3, whose projector drops the axis of a single feature."""

    @classmethod
    def of(cls, config: Any) -> Self:
        """`config`: of the whole model."""
        return cls(
            patch_size=config.vision_config.patch_size,
            merge_size=getattr(config, "spatial_merge_size", 1),
            num_channels=config.vision_config.num_channels,
            min_tokens=2 if config.model_type == "mistral3" else 1,
        )

    @property
    def token_size(self) -> int:
        """Pixels of a token in height, and in width."""
        return self.patch_size * self.merge_size

    def num_tokens(self, num_patches: int) -> int:
        """Returns how many tokens stand for an image of so many patches."""
        return num_patches // self.merge_size**2

    def arguments(self, images: Images) -> dict[str, Any]:
        """See Tower."""
        sizes = images.sizes.tolist()
        height, width = (max(pixels) for pixels in zip(*sizes, strict=True))
        patches = images.pixel_values.split(images.num_patches.tolist())
        pictures = [
            pad(
                fold(own.T[None], (own_height, own_width), self.patch_size, stride=self.patch_size),
                (0, width - own_width, 0, height - own_height),
            )
            for own, (own_height, own_width) in zip(patches, sizes, strict=True)
        ]
        return {"pixel_values": torch.cat(pictures), "image_sizes": sizes}

    def black(self) -> Images:
        """See Tower."""
        patches = torch.zeros(self.min_tokens * self.merge_size**2, self.num_channels * self.patch_size**2)
        return _image(patches, num_tokens=self.min_tokens, size=[self.token_size, self.min_tokens * self.token_size])


@dataclass(frozen=True, slots=True)
class TileTower:
    """A tower that reads tiles of one size: those of InternVL and LLaVA. `Images` hold tiles for patches, and as sizes
    the height and width of the pictures in pixels."""

    num_channels: int
    height: int
    """Of a tile, in pixels."""
    width: int
    tokens_per_tile: int
    is_cut: bool
    """Whether a picture is cut into several of them, between marks (InternVL); else it becomes one (LLaVA)."""

    @classmethod
    def of_internvl(cls, config: Any) -> Self:
        """`config`: of the whole model."""
        vision = config.vision_config
        height, width = vision.image_size
        patches = (height // vision.patch_size[0]) * (width // vision.patch_size[1])
        return cls(
            num_channels=vision.num_channels,
            height=height,
            width=width,
            tokens_per_tile=int(patches * config.downsample_ratio**2),
            is_cut=True,
        )

    @classmethod
    def of_llava(cls, config: Any) -> Self:
        """`config`: of the whole model, whose tower is CLIP or SigLIP. CLIP has a feature more than patches."""
        vision = config.vision_config
        num_features = (vision.image_size // vision.patch_size) ** 2 + (vision.model_type == "clip_vision_model")
        return cls(
            num_channels=vision.num_channels,
            height=vision.image_size,
            width=vision.image_size,
            tokens_per_tile=num_features - (config.vision_feature_select_strategy == "default"),
            is_cut=False,
        )

    def num_tokens(self, num_patches: int) -> int:
        """Returns how many tokens stand for an image of so many patches."""
        return num_patches * self.tokens_per_tile

    def arguments(self, images: Images) -> dict[str, Any]:
        """See Tower."""
        return {"pixel_values": images.pixel_values}

    def black(self) -> Images:
        """See Tower."""
        tile = torch.zeros(1, self.num_channels, self.height, self.width)
        return _image(tile, num_tokens=self.tokens_per_tile, size=[self.height, self.width])


@dataclass(frozen=True, slots=True)
class AnyresTower:
    """LLaVA-NeXT's, which reads a picture as one tile and again in several, of whose features those of padding are left
    out: how many tokens stand for it depends on its proportions. `Images` are as with TileTower."""

    tiles: TileTower
    pinpoints: Sequence[tuple[int, int]]
    """Heights and widths in pixels that the tiles of a picture may have together."""

    @classmethod
    def of(cls, config: Any) -> Self:
        """`config`: of the whole model."""
        return cls(tiles=TileTower.of_llava(config), pinpoints=[tuple(size) for size in config.image_grid_pinpoints])

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
        return _image(tiles, num_tokens=self.num_tokens(pinpoint, pinpoint), size=list(pinpoint))


def tower_of(config: Any) -> Tower | None:
    """Returns the vision tower of a model with this config; None if it has none, or one of another kind."""
    vision = getattr(config, VISION_CONFIG, None)
    if all(hasattr(vision, name) for name in _GRID_SIZES):
        return GridTower.of(vision)
    match config.model_type, getattr(vision, "model_type", None):
        case "mistral3" | "llava", "pixtral":
            return PixtralTower.of(config)
        case "internvl", _:
            return TileTower.of_internvl(config)
        case "llava", "clip_vision_model" | "siglip_vision_model":
            return TileTower.of_llava(config)
        case "llava_next", "clip_vision_model" | "siglip_vision_model":
            return AnyresTower.of(config)
    return None


def _image(patches: Tensor, *, num_tokens: int, size: list[int]) -> Images:
    """A single one."""
    return Images(
        pixel_values=patches,
        num_patches=torch.tensor([len(patches)]),
        num_tokens=torch.tensor([num_tokens]),
        sizes=torch.tensor([size]),
    )
