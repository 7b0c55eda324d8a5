"""The image processors of LLaVA, LLaVA-NeXT and LLaVA-OneVision."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.config import ModelError
from shardwise.data.image_processors.base import Extent, ImageProcessor
from shardwise.data.image_processors.tiles import OneTileProcessor, require_tile_size
from shardwise.families import LlavaNextTower, LlavaOnevisionTower, LlavaTower
from shardwise.types import ImageRef

if TYPE_CHECKING:
    from PIL.Image import Image


class LlavaProcessor(OneTileProcessor[LlavaTower]):
    """Makes one tile of a picture."""

    kinds = ("CLIPImageProcessor", "SiglipImageProcessor", "LlavaImageProcessor")


class LlavaNextProcessor(ImageProcessor[LlavaNextTower]):
    """Makes one tile of a picture, and several more of it in one of some sizes."""

    kinds = ("LlavaNextImageProcessor",)

    def __init__(self, processor: Any, tower: LlavaNextTower) -> None:
        require_tile_size(processor, tower.tiles)
        sizes = [tuple(size) for size in processor.image_grid_pinpoints]
        if sizes != tower.pinpoints:
            raise ModelError(
                f"image_grid_pinpoints={sizes} of the image processor are not {tower.pinpoints}, those of config.json; "
                "set them to these"
            )
        super().__init__(processor, tower)

    def measure(self, width: int, height: int) -> Extent:
        """See ImageProcessor."""
        from transformers.image_processing_utils import select_best_resolution

        pinpoint = select_best_resolution((height, width), self.tower.pinpoints)
        num_tokens = self.tower.num_tokens(pinpoint, (height, width))
        return Extent(self.tower.num_patches(pinpoint), num_tokens, [height, width])

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """See ImageProcessor."""
        return self._processed(picture)["pixel_values"][0], [picture.height, picture.width]


class LlavaOnevisionProcessor(LlavaNextProcessor):
    """As LLaVA-NeXT's, but that of pictures in one conversation each is one tile, padded to a square."""

    kinds = ("LlavaOnevisionImageProcessor",)
    tower: LlavaOnevisionTower

    def beside_others(self, image_ref: ImageRef) -> ImageRef:
        """See ImageProcessor."""
        return replace(image_ref, num_patches=1, num_tokens=self.tower.num_tokens_beside_others)

    def patches_of(self, picture: "Image", image_ref: ImageRef) -> tuple[Tensor, list[int]]:
        """See ImageProcessor."""
        if image_ref.num_patches > 1:
            return self.cut(picture)
        several = [[picture, picture.crop((0, 0, 1, 1))]]
        tiles = self._processor(images=several, do_convert_rgb=True, return_tensors="pt")["pixel_values"]
        return tiles[0], [picture.height, picture.width]
