"""The tower of Pixtral, which Mistral 3 has too."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch.nn.functional import fold, pad

from shardwise.families.towers.base import one_image
from shardwise.families.towers.patches import PatchTower
from shardwise.types import Images


@dataclass(frozen=True, slots=True)
class PixtralTower(PatchTower):
    """Pixtral, which reads whole pictures of all sizes, padded to the largest of them. `Images` hold their patches, and
    as sizes their height and width in pixels."""

    num_channels: int
    min_tokens: int
    """That an image has at least: 2 in Mistral 3, whose projector drops the axis of a single feature."""

    sees_all_patches: ClassVar[bool] = True
    follows_first_parameter: ClassVar[bool] = False

    @classmethod
    def of(cls, config: Any) -> Self:
        """`config`: of the whole model."""
        return cls(
            patch_size=config.vision_config.patch_size,
            merge_size=getattr(config, "spatial_merge_size", 1),
            num_channels=config.vision_config.num_channels,
            min_tokens=2 if config.model_type == "mistral3" else 1,
        )

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
        return one_image(patches, num_tokens=self.min_tokens, size=[self.token_size, self.min_tokens * self.token_size])
