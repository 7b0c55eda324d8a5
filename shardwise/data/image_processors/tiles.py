"""What image processors that make tiles of one size have in common."""

from typing import Any

from shardwise.config import ModelError
from shardwise.families import TileTower


def require_tile_size(processor: Any, tower: TileTower) -> None:
    """Raises ModelError if the tiles that transformers' image processor makes have another size than the tower's."""
    key = "crop_size" if getattr(processor, "do_center_crop", False) else "size"
    size, expected = dict(getattr(processor, key)), {"height": tower.height, "width": tower.width}
    if size != expected:
        raise ModelError(
            f"the image processor makes tiles of {key}={size}, and the vision tower reads {expected}, "
            "vision_config.image_size of config.json; set it to that"
        )
