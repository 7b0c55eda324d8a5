"""The image processor of Gemma 4."""

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.config import ModelError
from shardwise.data.image_processors.base import Extent, ImageProcessor
from shardwise.data.image_tokens import ImageTokens
from shardwise.families import Gemma4Tower
from shardwise.types import ImageRef

if TYPE_CHECKING:
    from PIL.Image import Image


class Gemma4Processor(ImageProcessor[Gemma4Tower]):
    """Keeps the proportions of pictures, in whole tokens, as many as it may have. Marks stand around them."""

    kinds = ("Gemma4ImageProcessor",)

    def __init__(self, processor: Any, tower: Gemma4Tower) -> None:
        for key, read in (("patch_size", tower.patch_size), ("pooling_kernel_size", tower.merge_size)):
            if (made := getattr(processor, key)) != read:
                raise ModelError(
                    f"the image processor has {key}={made}, and the vision tower {read}, {key} of vision_config in "
                    "config.json; set it to that"
                )
        super().__init__(processor, tower)
        self._resize = self._beside("get_aspect_ratio_preserving_size")

    def measure(self, width: int, height: int) -> Extent:
        """See ImageProcessor."""
        size = list(
            self._resize(
                height=height,
                width=width,
                patch_size=self.tower.patch_size,
                max_patches=self._processor.max_soft_tokens * self.tower.merge_size**2,
                pooling_kernel_size=self.tower.merge_size,
            )
        )
        num_patches = math.prod(size) // self.tower.patch_size**2
        return Extent(num_patches, self.tower.num_tokens(num_patches), size)

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """See ImageProcessor."""
        extent = self.measure(picture.width, picture.height)
        return self._processed(picture)["pixel_values"][0, : extent.num_patches], extent.size

    def placeholder(self, image_ref: ImageRef, tokens: ImageTokens) -> list[int]:
        """See ImageProcessor."""
        start, end = tokens.named("boi_token"), tokens.named("eoi_token")
        return [start, *super().placeholder(image_ref, tokens), end]
