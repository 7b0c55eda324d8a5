"""The image processors of Qwen and GLM."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.data.image_processors.base import Extent, ImageProcessor
from shardwise.families import GridTower

if TYPE_CHECKING:
    from PIL.Image import Image


class GridProcessor(ImageProcessor[GridTower]):
    """Cuts pictures into a grid of small patches."""

    kinds = ("Qwen2VLImageProcessor", "Glm4vImageProcessor", "Glm46VImageProcessor")

    def __init__(self, processor: Any, tower: GridTower) -> None:
        super().__init__(processor, tower)
        self._resize = self._smart_resize()

    def measure(self, width: int, height: int) -> Extent:
        """See ImageProcessor."""
        processor = self._processor
        resized = self._resize(
            height=height,
            width=width,
            factor=processor.patch_size * processor.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )
        grid = [1, *(pixels // processor.patch_size for pixels in resized)]
        num_patches = math.prod(grid)
        return Extent(num_patches, self.tower.num_tokens(num_patches), grid)

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """See ImageProcessor."""
        found = self._processed(picture)
        return found["pixel_values"], found["image_grid_thw"][0].tolist()

    def _smart_resize(self) -> Callable[..., tuple[int, int]]:
        """Returns how the processor itself finds the size in which it looks at an image. GLM's counts the pixels of as
        many copies of an image as a patch has frames."""
        resize: Callable[..., tuple[int, int]] = self._beside("smart_resize")
        frames = ("num_frames", "temporal_factor")
        taken = inspect.signature(resize).parameters.keys()
        return partial(resize, **dict.fromkeys(taken & frames, self._processor.temporal_patch_size))
