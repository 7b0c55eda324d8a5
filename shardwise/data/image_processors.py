"""What transformers' image processors make of a picture: how large it becomes, and its patches."""

import inspect
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import unfold

from shardwise.config import ModelError
from shardwise.data.sources import describe_type
from shardwise.families import AnyresTower, GridTower, PixtralTower, TileTower, Tower

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Extent:
    """What a picture of some size becomes."""

    num_patches: int
    num_tokens: int
    size: list[int]
    """The row of the picture in `Images.sizes`."""


class ImageProcessor(Protocol):
    """Prepares pictures for one kind of vision tower."""

    def measure(self, width: int, height: int) -> Extent:
        """Returns what becomes of a picture of so many pixels.

        Raises:
            ValueError: the model takes no picture of this size; says what to do about it.
        """
        ...

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """Returns the patches of a picture, as in `Images.pixel_values`, and its size."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """What of its files decides what becomes of pictures."""
        ...


class GridProcessor:
    """Cuts pictures into a grid of small patches, for Qwen and GLM."""

    def __init__(self, processor: Any, tower: GridTower) -> None:
        """`processor`: transformers'."""
        self._processor = processor
        self._tower = tower
        self._resize = _smart_resize(processor)

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
        return Extent(num_patches, self._tower.num_tokens(num_patches), grid)

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """See ImageProcessor."""
        found = _processed(self._processor, picture)
        return found["pixel_values"], found["image_grid_thw"][0].tolist()

    @property
    def settings(self) -> dict[str, Any]:
        """See ImageProcessor."""
        return _settings(self._processor)


class PixtralProcessor:
    """Keeps the proportions of pictures, in whole tokens, for Pixtral."""

    def __init__(self, processor: Any, tower: PixtralTower) -> None:
        """`processor`: transformers'."""
        self._processor = processor
        self._tower = tower
        self._resize: Callable[..., tuple[int, int]] = _beside(processor, "get_resize_output_image_size")

    def measure(self, width: int, height: int) -> Extent:
        """See ImageProcessor."""
        limit, token_size = self._processor.size, self._tower.token_size
        picture = torch.empty(self._tower.num_channels, height, width, device="meta")  # of which it reads the shape
        limits = limit.longest_edge or (limit.height, limit.width)
        size = list(self._resize(picture, limits, token_size, input_data_format="channels_first"))
        num_patches = math.prod(size) // self._tower.patch_size**2
        num_tokens = self._tower.num_tokens(num_patches)
        if 0 < num_tokens < self._tower.min_tokens:
            raise ValueError(
                f"it would be {num_tokens} token of {token_size} x {token_size} pixels, and the model takes no image "
                f"of less than {self._tower.min_tokens}; enlarge it"
            )
        return Extent(num_patches, num_tokens, size)

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """See ImageProcessor."""
        found = _processed(self._processor, picture, patch_size=self._tower.token_size)
        patch_size = self._tower.patch_size
        patches = unfold(found["pixel_values"], patch_size, stride=patch_size)[0].T
        return patches.contiguous(), found["image_sizes"][0].tolist()

    @property
    def settings(self) -> dict[str, Any]:
        """See ImageProcessor."""
        return _settings(self._processor)


class TileProcessor:
    """Makes tiles of one size: several of a picture with a thumbnail behind them, for InternVL, or one, for LLaVA."""

    def __init__(self, processor: Any, tower: TileTower) -> None:
        """`processor`: transformers'.

        Raises:
            ModelError: its tiles are not those of the tower.
        """
        _require_size(processor, tower)
        self._processor = processor
        self._tower = tower
        # As InternVL's processor asks, whatever preprocessor_config.json says.
        self._options = {"crop_to_patches": True} if tower.is_cut else {}

    def measure(self, width: int, height: int) -> Extent:
        """See ImageProcessor."""
        num_patches = 1
        if self._tower.is_cut:
            num_patches = self._processor.get_number_of_image_patches(height, width, self._options)
        return Extent(num_patches, self._tower.num_tokens(num_patches), [height, width])

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """See ImageProcessor."""
        found = _processed(self._processor, picture, **self._options)
        return found["pixel_values"], [picture.height, picture.width]

    @property
    def settings(self) -> dict[str, Any]:
        """See ImageProcessor."""
        return _settings(self._processor)


class AnyresProcessor:
    """Makes one tile of a picture, and several more of it in one of some sizes, for LLaVA-NeXT."""

    def __init__(self, processor: Any, tower: AnyresTower) -> None:
        """`processor`: transformers'.

        Raises:
            ModelError: its tiles, or the sizes, are not those of the tower.
        """
        _require_size(processor, tower.tiles)
        sizes = [tuple(size) for size in processor.image_grid_pinpoints]
        if sizes != tower.pinpoints:
            raise ModelError(
                f"image_grid_pinpoints={sizes} of the image processor are not {tower.pinpoints}, those of config.json; "
                "set them to these"
            )
        self._processor = processor
        self._tower = tower

    def measure(self, width: int, height: int) -> Extent:
        """See ImageProcessor."""
        from transformers.image_processing_utils import select_best_resolution

        pinpoint = select_best_resolution((height, width), self._tower.pinpoints)
        num_tokens = self._tower.num_tokens(pinpoint, (height, width))
        return Extent(self._tower.num_patches(pinpoint), num_tokens, [height, width])

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """See ImageProcessor."""
        found = _processed(self._processor, picture)
        return found["pixel_values"][0], [picture.height, picture.width]

    @property
    def settings(self) -> dict[str, Any]:
        """See ImageProcessor."""
        return _settings(self._processor)


def image_processor_for(tower: Tower, processor: Any) -> ImageProcessor:
    """Wraps transformers' image processor of a model with this tower.

    Raises:
        ModelError: it belongs to models of another kind, or makes what this tower does not read.
    """
    wrap: Callable[[Any, Any], ImageProcessor]
    kinds: tuple[str, ...]
    match tower:
        case GridTower():
            wrap, kinds = GridProcessor, ("Qwen2VLImageProcessor", "Glm4vImageProcessor", "Glm46VImageProcessor")
        case PixtralTower():
            wrap, kinds = PixtralProcessor, ("PixtralImageProcessor",)
        case TileTower(is_cut=True):
            wrap, kinds = TileProcessor, ("GotOcr2ImageProcessor",)
        case TileTower():
            wrap, kinds = TileProcessor, ("CLIPImageProcessor", "SiglipImageProcessor", "LlavaImageProcessor")
        case AnyresTower():
            wrap, kinds = AnyresProcessor, ("LlavaNextImageProcessor",)
    kind = type(processor).__name__
    if not kind.startswith(kinds):  # the backend follows
        raise ModelError(
            f"the image processor is {kind}, and images for this model are prepared by {' or '.join(kinds)}; take the "
            "file that belongs to the model, or remove it to learn from words alone"
        )
    return wrap(processor, tower)


def _processed(processor: Any, picture: "Image", **options: Any) -> Any:
    """What a processor of transformers makes of one picture."""
    return processor(images=[picture], do_convert_rgb=True, return_tensors="pt", **options)


def _settings(processor: Any) -> dict[str, Any]:
    """What a processor of transformers was made with, whichever release wrote its file."""
    return {key: value for key, value in processor.to_dict().items() if value is not None and key != "processor_class"}


def _require_size(processor: Any, tower: TileTower) -> None:
    """Raises ModelError if tiles have another size than the tower's."""
    key = "crop_size" if processor.do_center_crop else "size"
    size, expected = dict(getattr(processor, key)), {"height": tower.height, "width": tower.width}
    if size != expected:
        raise ModelError(
            f"the image processor makes tiles of {key}={size}, and the vision tower reads {expected}, "
            "vision_config.image_size of config.json; set it to that"
        )


def read_keys(path: Path, key: str | None = None) -> dict[str, Any]:
    """Reads a JSON file of a processor; returns what it says, or says under `key`: nothing where there is no file.

    Raises:
        ModelError: it cannot be read.
    """
    if not path.is_file():
        return {}
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError(f"it holds {describe_type(tree)} instead of keys")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; download or copy it again") from None
    return tree if key is None else tree.get(key) or {}


def _smart_resize(processor: Any) -> Callable[..., tuple[int, int]]:
    """Returns how the processor itself finds the size in which it looks at an image. GLM's counts the pixels of as many
    copies of an image as a patch has frames."""
    resize: Callable[..., tuple[int, int]] = _beside(processor, "smart_resize")
    frames = ("num_frames", "temporal_factor")
    counted = dict.fromkeys(inspect.signature(resize).parameters.keys() & frames, processor.temporal_patch_size)
    return partial(resize, **counted)


def _beside(processor: Any, name: str) -> Any:
    """Returns a function of the module that the class of a processor stands in."""
    return getattr(sys.modules[type(processor).__module__], name)
