"""The image processor of Gemma 3."""

from typing import Any

from shardwise.config import ModelError
from shardwise.data.image_processors.tiles import OneTileProcessor
from shardwise.data.image_tokens import ImageTokens
from shardwise.families import Gemma3Tower


class Gemma3Processor(OneTileProcessor[Gemma3Tower]):
    """Makes one tile of a picture. Chat templates write where an image begins; what the model reads has a mark around
    it too, and empty lines around both, which become one token with the lines of words beside them."""

    kinds = ("Gemma3ImageProcessor",)

    def __init__(self, processor: Any, tower: Gemma3Tower) -> None:
        if processor.do_pan_and_scan:
            raise ModelError(
                "do_pan_and_scan=true of the image processor, which shows crops of a picture as further images, is not "
                "supported; set it to false"
            )
        super().__init__(processor, tower)

    def mark(self, tokens: ImageTokens) -> str:
        """See ImageProcessor."""
        return tokens.spelling("boi_token")

    def as_read(self, text: str, tokens: ImageTokens) -> str:
        """See ImageProcessor."""
        start, end = self.mark(tokens), tokens.spelling("eoi_token")
        return text.replace(start, f"\n\n{start}{tokens.image}{end}\n\n")
