"""The image processor of Pixtral and Mistral 3."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import unfold

from shardwise.data.image_processors.base import Extent, ImageProcessor
from shardwise.data.image_tokens import ImageTokens
from shardwise.families import PixtralTower
from shardwise.types import ImageRef

if TYPE_CHECKING:
    from PIL.Image import Image

_ROW_END = ("image_break_token", "[IMG_BREAK]")
"""Key of processor_config.json, and what transformers' PixtralProcessor has for it where it is not there."""
_IMAGE_END = ("image_end_token", "[IMG_END]")


class PixtralProcessor(ImageProcessor[PixtralTower]):
    """Keeps the proportions of pictures, in whole tokens. A mark ends every row of tokens."""

    kinds = ("PixtralImageProcessor",)

    def __init__(self, processor: Any, tower: PixtralTower) -> None:
        super().__init__(processor, tower)
        self._resize: Callable[..., tuple[int, int]] = self._beside("get_resize_output_image_size")

    def measure(self, width: int, height: int) -> Extent:
        """See ImageProcessor."""
        limit, token_size = self._processor.size, self.tower.token_size
        picture = torch.empty(self.tower.num_channels, height, width, device="meta")  # of which it reads the shape
        limits = limit.longest_edge or (limit.height, limit.width)
        size = list(self._resize(picture, limits, token_size, input_data_format="channels_first"))
        num_patches = math.prod(size) // self.tower.patch_size**2
        num_tokens = self.tower.num_tokens(num_patches)
        if 0 < num_tokens < self.tower.min_tokens:
            raise ValueError(
                f"it would be {num_tokens} token of {token_size} x {token_size} pixels, and the model takes no image "
                f"of less than {self.tower.min_tokens}; enlarge it"
            )
        return Extent(num_patches, num_tokens, size)

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """See ImageProcessor."""
        found = self._processed(picture, patch_size=self.tower.token_size)
        patch_size = self.tower.patch_size
        patches = unfold(found["pixel_values"], patch_size, stride=patch_size)[0].T
        return patches.contiguous(), found["image_sizes"][0].tolist()

    def placeholder(self, image_ref: ImageRef, tokens: ImageTokens) -> list[int]:
        """See ImageProcessor."""
        row_end, image_end = tokens.configured(*_ROW_END), tokens.configured(*_IMAGE_END)
        height, width = (pixels // self.tower.token_size for pixels in image_ref.size)
        rows = [*[tokens.image_id] * width, row_end] * height
        return [*rows[:-1], image_end]
