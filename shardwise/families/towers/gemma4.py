"""The tower of Gemma 4."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shardwise.families.towers.base import one_image
from shardwise.families.towers.patches import PatchTower
from shardwise.types import Images
from shardwise.uploads import to_device


@dataclass(frozen=True, slots=True)
class Gemma4Tower(PatchTower):
    """A tower that reads the patches of pictures of all sizes, padded to as many as the largest has, and where each of
    them is. `Images` have as sizes the height and width of pictures in pixels."""

    num_channels: ClassVar[int] = 3
    sees_all_patches: ClassVar[bool] = False
    follows_first_parameter: ClassVar[bool] = False

    @classmethod
    def of(cls, vision: Any) -> Self:
        """`vision`: the config of the tower."""
        return cls(patch_size=vision.patch_size, merge_size=vision.pooling_kernel_size)

    def arguments(self, images: Images) -> dict[str, Any]:
        """See Tower."""
        patches = images.pixel_values.split(images.num_patches.tolist())
        places = pad_sequence(list(map(self._places, images.sizes.tolist())), batch_first=True, padding_value=-1)
        return {
            "pixel_values": pad_sequence(patches, batch_first=True),
            "image_position_ids": to_device(places, images.pixel_values.device),
        }

    def black(self) -> Images:
        """See Tower."""
        patches = torch.zeros(self.merge_size**2, self.num_channels * self.patch_size**2)
        return one_image(patches, num_tokens=1, size=[self.token_size] * 2)

    def _places(self, size: Iterable[int]) -> Tensor:
        """Returns the column and the row of each patch [N, 2] of a picture of this size."""
        rows, columns = (torch.arange(pixels // self.patch_size) for pixels in size)
        return torch.cartesian_prod(rows, columns).view(-1, 2).flip(1)
