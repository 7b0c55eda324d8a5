"""What transformers' image processors make of a picture: how large it becomes, and its patches."""

import inspect
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from shardwise.families import GridTower, Tower

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageProcessor(Protocol):
    """Prepares pictures for one kind of vision tower."""

    def measure(self, width: int, height: int) -> tuple[int, list[int]]:
        """Returns num_patches and size, as in `ImageRef`, of a picture of so many pixels.

        Raises:
            ValueError: the processor refuses its proportions.
        """
        ...

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """Returns the patches of a picture, as in `Images.pixel_values`, and its size."""
        ...


class GridProcessor:
    """Cuts pictures into a grid of small patches, for Qwen and GLM."""

    def __init__(self, processor: Any) -> None:
        """`processor`: transformers'."""
        self._processor = processor
        self._resize = _smart_resize(processor)

    def measure(self, width: int, height: int) -> tuple[int, list[int]]:
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
        return math.prod(grid), grid

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """See ImageProcessor."""
        found = self._processor(images=[picture], do_convert_rgb=True, return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"][0].tolist()


def image_processor_for(tower: Tower, processor: Any) -> ImageProcessor | None:
    """Wraps transformers' image processor of a model with this tower; None if it belongs to models of another kind."""
    match tower:
        case GridTower() if hasattr(processor, "merge_size"):
            return GridProcessor(processor)
    return None


def _smart_resize(processor: Any) -> Callable[..., tuple[int, int]]:
    """Returns how the processor itself finds the size in which it looks at an image. GLM's counts the pixels of as many
    copies of an image as a patch has frames."""
    resize: Callable[..., tuple[int, int]] = sys.modules[type(processor).__module__].smart_resize
    frames = ("num_frames", "temporal_factor")
    counted = dict.fromkeys(inspect.signature(resize).parameters.keys() & frames, processor.temporal_patch_size)
    return partial(resize, **counted)
