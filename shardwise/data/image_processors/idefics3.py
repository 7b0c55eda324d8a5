"""The image processors of Idefics 3 and SmolVLM."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.config import ModelError
from shardwise.data.image_processors.base import Extent, ImageProcessor
from shardwise.data.image_tokens import ImageTokens
from shardwise.families import Idefics3Tower
from shardwise.types import ImageRef

if TYPE_CHECKING:
    from PIL.Image import Image

_AROUND = ("fake_image_token", "<fake_token_around_image>")
"""What a tokenizer calls a mark, and the mark of one that does not call it anything."""
_WHOLE = ("global_image_token", "<global-img>")


class Idefics3Processor(ImageProcessor[Idefics3Tower]):
    """Cuts a picture into rows of tiles, and makes one of all of it behind them. Marks say which tile follows."""

    kinds = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")

    def __init__(self, processor: Any, tower: Idefics3Tower) -> None:
        side = processor.max_image_size["longest_edge"]
        if side != tower.height:
            raise ModelError(
                f"the image processor makes tiles of max_image_size={processor.max_image_size}, and the vision tower "
                f"reads {tower.height} x {tower.width} pixels, vision_config.image_size of config.json; set its "
                f"longest_edge to {tower.height}"
            )
        super().__init__(processor, tower)
        self._resize: Callable[..., tuple[int, int]] = self._beside("get_resize_output_image_size")

    def measure(self, width: int, height: int) -> Extent:
        """See ImageProcessor."""
        rows, columns = self._grid(width, height)
        num_tiles = rows * columns + 1
        return Extent(num_tiles, self.tower.num_tokens(num_tiles), [height, width])

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """See ImageProcessor."""
        return self._processed(picture)["pixel_values"][0], [picture.height, picture.width]

    def placeholder(self, image_ref: ImageRef, tokens: ImageTokens) -> list[int]:
        """See ImageProcessor."""
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string  # Idefics 3's too

        height, width = image_ref.size
        text = get_image_prompt_string(
            *self._grid(width, height),
            self.tower.tokens_per_tile,
            fake_token_around_image=tokens.spelling(*_AROUND),
            image_token=tokens.image,
            global_image_token=tokens.spelling(*_WHOLE),
        )
        return tokens.encoded(text)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns the rows and columns of the tiles beside the one of the whole picture, 0 of a picture that is that
        one alone. What the processor's own get_number_of_image_patches says is not always what it does."""
        if not self._processor.do_image_splitting:
            return 0, 0
        size, side = self._processor.size, self.tower.height
        if size.longest_edge:
            picture = torch.empty(self.tower.num_channels, height, width, device="meta")  # of which it reads the shape
            height, width = self._resize(picture, resolution_max_side=size.longest_edge)
        else:
            height, width = size.height, size.width
        proportion = width / height
        if width >= height:
            columns = math.ceil(width / side)
            rows = math.ceil(int(columns * side / proportion) / side)
        else:
            rows = math.ceil(height / side)
            columns = math.ceil(int(rows * side * proportion) / side)
        return (rows, columns) if rows * columns > 1 else (0, 0)
