"""The image processor of LFM2-VL."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.config import ModelError
from shardwise.data.image_processors.base import Extent, ImageProcessor
from shardwise.data.image_tokens import ImageTokens
from shardwise.families import Lfm2VlTower
from shardwise.types import ImageRef

if TYPE_CHECKING:
    from PIL.Image import Image

_START = ("image_start_token", "<|image_start|>")
"""What a tokenizer calls a mark, and the mark of one that does not call it anything."""
_END = ("image_end_token", "<|image_end|>")
_WHOLE = ("image_thumbnail_token", "<|img_thumbnail|>")


class Lfm2VlProcessor(ImageProcessor[Lfm2VlTower]):
    """Keeps the proportions of a picture in whole tokens; cuts a large one into squares too. Marks stand around all of
    them and say which square follows. Transformers' own needs torchvision."""

    kinds = ("Lfm2VlImageProcessor",)

    def __init__(self, processor: Any, tower: Lfm2VlTower) -> None:
        for key, expected in {"encoder_patch_size": tower.patch_size, "downsample_factor": tower.merge_size}.items():
            if getattr(processor, key) != expected:
                raise ModelError(
                    f"{key}={getattr(processor, key)} of the image processor is not the {expected} of config.json; set "
                    "it to that"
                )
        if processor.do_image_splitting and processor.tile_size % tower.token_size:
            raise ModelError(
                f"tile_size={processor.tile_size} of the image processor is no multiple of the {tower.token_size} "
                "pixels of a token; set it to one"
            )
        if processor.do_image_splitting and processor.min_tiles == 1 < processor.max_tiles:
            raise ModelError(
                "min_tiles=1 of the image processor: it would make one square of a large picture, and write tokens for "
                "the picture in its proportions; set it to 2"
            )
        super().__init__(processor, tower)

    def measure(self, width: int, height: int) -> Extent:
        """See ImageProcessor."""
        patch_size = self.tower.patch_size
        rows, columns = self._squares(width, height)
        size = self._asked("downsample_factor", "min_image_tokens", "max_image_tokens", "encoder_patch_size")
        across, down = (pixels // patch_size for pixels in self._processor.smart_resize(height, width, **size))
        side = self._processor.tile_size // patch_size
        num_patches = 0 if rows * columns == 1 else rows * columns * side**2
        if not num_patches or self._processor.use_thumbnail:
            num_patches += down * across
        return Extent(num_patches, self.tower.num_tokens(num_patches), [rows, columns, side, down, across])

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """See ImageProcessor."""
        found = self._processed(picture, do_pad=True)
        return found["pixel_values"][found["pixel_attention_mask"].bool()], self.measure(*picture.size).size

    def placeholder(self, image_ref: ImageRef, tokens: ImageTokens) -> list[int]:
        """See ImageProcessor."""
        rows, columns, side, down, across = image_ref.size
        start, end, whole = (tokens.spelling(*mark) for mark in (_START, _END, _WHOLE))
        square, picture = (tokens.image * self.tower.num_tokens(count) for count in (side**2, down * across))
        if rows * columns == 1:
            return tokens.encoded(f"{start}{picture}{end}")
        places = ((row, column) for row in range(1, rows + 1) for column in range(1, columns + 1))
        squares = "".join(f"<|img_row_{row}_col_{column}|>{square}" for row, column in places)
        behind = f"{whole}{picture}" if self._processor.use_thumbnail else ""
        return tokens.encoded(f"{start}{squares}{behind}{end}")

    def _squares(self, width: int, height: int) -> tuple[int, int]:
        """Returns the rows and columns that a picture is cut into; one of each if it stays whole."""
        processor = self._processor
        limits = self._asked("max_image_tokens", "encoder_patch_size", "downsample_factor", "max_pixels_tolerance")
        if not processor.do_image_splitting or not processor._is_image_too_large(height, width, **limits):
            return 1, 1
        columns, rows, *_ = processor._get_grid_layout(
            height, width, **self._asked("min_tiles", "max_tiles", "tile_size")
        )
        return rows, columns

    def _asked(self, *names: str) -> dict[str, Any]:
        """Returns settings of the processor as keyword arguments of its methods."""
        return {name: getattr(self._processor, name) for name in names}
