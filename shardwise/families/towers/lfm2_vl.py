"""The tower of LFM2-VL."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch.nn.utils.rnn import pad_sequence

from shardwise.families.towers.base import one_image
from shardwise.families.towers.patches import PatchTower
from shardwise.types import Images
from shardwise.uploads import to_device


@dataclass(frozen=True, slots=True)
class Lfm2VlTower(PatchTower):
    """SigLIP 2, which reads tiles of all sizes, padded to the patches of the largest. A picture is one tile, or several
    squares with or without one of the whole picture behind them. `Images` hold patches, and as sizes rows and columns
    of the squares, patches of one in height and width, and height and width of the whole picture in patches."""

    num_channels: int
    sees_all_patches: ClassVar[bool] = False
    follows_first_parameter: ClassVar[bool] = False

    @classmethod
    def of(cls, config: Any) -> Self:
        """`config`: of the whole model."""
        vision = config.vision_config
        return cls(patch_size=vision.patch_size, merge_size=config.downsample_factor, num_channels=vision.num_channels)

    def arguments(self, images: Images) -> dict[str, Any]:
        """See Tower."""
        counts = zip(images.sizes.tolist(), images.num_patches.tolist(), strict=True)
        shapes = torch.tensor([shape for size, num_patches in counts for shape in tile_shapes(size, num_patches)])
        lengths = shapes.prod(1)
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        tiles = pad_sequence(images.pixel_values.split(lengths.tolist()), batch_first=True)
        device = tiles.device
        return {
            "pixel_values": tiles,
            "spatial_shapes": to_device(shapes, device),
            "pixel_attention_mask": to_device(mask.int(), device),
        }

    def black(self) -> Images:
        """See Tower."""
        side = self.merge_size
        patches = torch.zeros(side**2, self.num_channels * self.patch_size**2)
        return one_image(patches, num_tokens=1, size=[1, 1, side, side, side])


def tile_shapes(size: list[int], num_patches: int) -> list[list[int]]:
    """Returns the height and width in patches of each tile of an image, of whose sizes this is the row."""
    rows, columns, side, height, width = size
    if rows * columns == 1:
        return [[height, width]]
    squares = [[side, side]] * (rows * columns)
    return squares if num_patches == len(squares) * side**2 else [*squares, [height, width]]
