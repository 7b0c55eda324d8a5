"""What image processors that make tiles of one size have in common."""

from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from shardwise.config import ModelError
from shardwise.data.image_processors.base import Extent, ImageProcessor
from shardwise.families import TileTower

if TYPE_CHECKING:
    from PIL.Image import Image

AnyTileTower = TypeVar("AnyTileTower", bound=TileTower)


class OneTileProcessor(ImageProcessor[AnyTileTower]):
    """Makes one tile of a picture."""

    def __init__(self, processor: Any, tower: AnyTileTower) -> None:
        require_tile_size(processor, tower)
        super().__init__(processor, tower)

    def measure(self, width: int, height: int) -> Extent:
        """See ImageProcessor."""
        return Extent(1, self.tower.tokens_per_tile, [height, width])

    def cut(self, picture: "Image") -> tuple[Tensor, list[int]]:
        """See ImageProcessor."""
        return self._processed(picture)["pixel_values"], [picture.height, picture.width]


def require_tile_size(processor: Any, tower: TileTower) -> None:
    """Raises ModelError if the tiles that transformers' image processor makes have another size than the tower's."""
    key = "crop_size" if getattr(processor, "do_center_crop", False) else "size"
    size, expected = dict(getattr(processor, key)), {"height": tower.height, "width": tower.width}
    if size != expected:
        raise ModelError(
            f"the image processor makes tiles of {key}={size}, and the vision tower reads {expected}, "
            "vision_config.image_size of config.json; set it to that"
        )
