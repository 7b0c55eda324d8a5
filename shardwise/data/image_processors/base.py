"""What rows and batches ask of an image processor."""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch import Tensor

from shardwise.data.image_tokens import ImageTokens
from shardwise.families import Tower
from shardwise.types import ImageRef

if TYPE_CHECKING:
    from PIL.Image import Image

AnyTower = TypeVar("AnyTower", bound=Tower)


@dataclass(frozen=True, slots=True)
class Extent:
    """What a picture of some size becomes."""

    num_patches: int
    num_tokens: int
    size: list[int]
    """The row of the picture in `Images.sizes`."""


class ImageProcessor(ABC, Generic[AnyTower]):
    """Prepares pictures for one kind of vision tower, and says which tokens stand for them."""

    kinds: ClassVar[tuple[str, ...]]
    """The image processors of transformers that this wraps, by their names without the backend."""

    def __init__(self, processor: Any, tower: AnyTower) -> None:
        """
        Args:
            processor: transformers' image processor.
            tower: of the model.
        Raises:
            ModelError: the processor makes what the tower does not read.
        """
        self._processor = processor
        self.tower = tower
        """What it prepares pictures for."""

    @abstractmethod
    def measure(self, width: int, height: int) -> Extent:
        """Returns what becomes of a picture of so many pixels.

        Raises:
            ValueError: the model takes no picture of this size; says what to do about it.
        """

    @abstractmethod
    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """Returns the patches of a picture, as in `Images.pixel_values`, and its size."""

    def mark(self, tokens: ImageTokens) -> str:
        """Returns the token that chat templates write once for an image, maybe among other text.

        Raises:
            ModelError: the tokenizer does not name it.
        """
        return tokens.image

    def as_read(self, text: str, tokens: ImageTokens) -> str:
        """Returns what is tokenized of a rendered text: with the token of images once for each.

        Raises:
            ModelError: the tokenizer does not name a mark.
        """
        return text

    def beside_others(self, image_ref: ImageRef) -> ImageRef:
        """Returns what becomes of a picture whose conversation has several; the same with most models."""
        return image_ref

    def patches_of(self, picture: "Image", image_ref: ImageRef) -> tuple[Tensor, list[int]]:
        """Returns what `cut` does, of a picture that `image_ref` says has others beside it or none."""
        return self.cut(picture)

    def placeholder(self, image_ref: ImageRef, tokens: ImageTokens) -> list[int]:
        """Returns the tokens that stand for an image in place of the one that is read: one for each feature that the
        tower makes of it, and marks.

        Raises:
            ModelError: the tokenizer has no token for a mark.
        """
        return [tokens.image_id] * image_ref.num_tokens

    @property
    def settings(self) -> dict[str, Any]:
        """What transformers' image processor was made with, whichever release wrote its file."""
        keys = self._processor.to_dict().items()
        return {key: value for key, value in keys if value is not None and key != "processor_class"}

    def _processed(self, picture: "Image", **options: Any) -> Any:
        """Returns what transformers' image processor makes of one picture."""
        return self._processor(images=[picture], do_convert_rgb=True, return_tensors="pt", **options)

    def _beside(self, name: str) -> Any:
        """Returns a function of the module that the class of transformers' image processor stands in."""
        return getattr(sys.modules[type(self._processor).__module__], name)
