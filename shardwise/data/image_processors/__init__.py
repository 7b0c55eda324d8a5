"""What transformers' image processors make of a picture: how large it becomes, its patches, and its tokens."""

from typing import Any

from shardwise.config import ModelError
from shardwise.data.image_processors.base import Extent, ImageProcessor
from shardwise.data.image_processors.gemma3 import Gemma3Processor
from shardwise.data.image_processors.gemma4 import Gemma4Processor
from shardwise.data.image_processors.grid import GridProcessor
from shardwise.data.image_processors.idefics3 import Idefics3Processor
from shardwise.data.image_processors.internvl import InternVLProcessor
from shardwise.data.image_processors.lfm2_vl import Lfm2VlProcessor
from shardwise.data.image_processors.llava import LlavaNextProcessor, LlavaOnevisionProcessor, LlavaProcessor
from shardwise.data.image_processors.pixtral import PixtralProcessor
from shardwise.families import (
    Gemma3Tower,
    Gemma4Tower,
    GridTower,
    Idefics3Tower,
    InternVLTower,
    Lfm2VlTower,
    LlavaNextTower,
    LlavaOnevisionTower,
    LlavaTower,
    PixtralTower,
    Tower,
)

_PROCESSORS: dict[type[Tower], type[ImageProcessor[Any]]] = {
    GridTower: GridProcessor,
    PixtralTower: PixtralProcessor,
    Idefics3Tower: Idefics3Processor,
    InternVLTower: InternVLProcessor,
    Lfm2VlTower: Lfm2VlProcessor,
    LlavaTower: LlavaProcessor,
    LlavaNextTower: LlavaNextProcessor,
    LlavaOnevisionTower: LlavaOnevisionProcessor,
    Gemma3Tower: Gemma3Processor,
    Gemma4Tower: Gemma4Processor,
}


def image_processor_for(tower: Tower, processor: Any) -> ImageProcessor[Any]:
    """Wraps transformers' image processor of a model with this tower.

    Raises:
        ModelError: it belongs to models of another kind, or makes what this tower does not read.
    """
    wrap = _PROCESSORS[type(tower)]
    kind = type(processor).__name__
    if not kind.startswith(wrap.kinds):  # the backend follows
        raise ModelError(
            f"the image processor is {kind}, and images for this model are prepared by {' or '.join(wrap.kinds)}; take "
            "the file that belongs to the model, or remove it to learn from words alone"
        )
    return wrap(processor, tower)
