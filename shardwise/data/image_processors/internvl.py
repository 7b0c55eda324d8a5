"""The image processor of InternVL."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.data.image_processors.base import Extent, ImageProcessor
from shardwise.data.image_processors.tiles import require_tile_size
from shardwise.data.image_tokens import ImageTokens
from shardwise.families import InternVLTower
from shardwise.types import ImageRef

if TYPE_CHECKING:
    from PIL.Image import Image

_OPTIONS = {"crop_to_patches": True}
"""As transformers' InternVLProcessor asks, whatever preprocessor_config.json says."""


class InternVLProcessor(ImageProcessor[InternVLTower]):
    """Cuts a picture into tiles, with a thumbnail of it behind them. Marks stand around all of them."""

    kinds = ("GotOcr2ImageProcessor",)

    def __init__(self, processor: Any, tower: InternVLTower) -> None:
        require_tile_size(processor, tower)
        super().__init__(processor, tower)

    def measure(self, width: int, height: int) -> Extent:
        """See ImageProcessor."""
        num_tiles = self._processor.get_number_of_image_patches(height, width, _OPTIONS)
        return Extent(num_tiles, self.tower.num_tokens(num_tiles), [height, width])

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """See ImageProcessor."""
        return self._processed(picture, **_OPTIONS)["pixel_values"], [picture.height, picture.width]

    def placeholder(self, image_ref: ImageRef, tokens: ImageTokens) -> list[int]:
        """See ImageProcessor."""
        start, end = tokens.named("start_image_token"), tokens.named("end_image_token")
        return [start, *super().placeholder(image_ref, tokens), end]
