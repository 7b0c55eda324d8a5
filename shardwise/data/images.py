"""Image files: their size, known when a row is read, and their pixels, once a batch needs them."""

import io
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from errno import ENAMETOOLONG, ENOENT
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from shardwise.config import DataError, ModelError, in_one_line
from shardwise.data.image_processors import ImageProcessor, image_processor_for
from shardwise.data.image_tokens import ImageTokens
from shardwise.data.processor_files import read_keys
from shardwise.data.sources import describe_type, preview
from shardwise.families import tower_of
from shardwise.model_config import read_model_config
from shardwise.types import ImageRef, Images

if TYPE_CHECKING:
    from PIL.Image import Image

_CONFIGS = {"preprocessor_config.json": None, "processor_config.json": "image_processor"}
"""Where a model folder says how images are prepared, and under which key; in the second file since transformers 5."""
FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 89_478_485
"""Pixels of an image as it is stored: where PIL begins to warn of files that are made to fill the memory."""
MAX_PROPORTION = 200
"""The longer side in shorter ones: what Qwen and GLM take. Others would scale an image of few bytes up to fill the
memory, or one side of it to nothing."""
_LONGEST_SHOWN = 300
"""Characters of a path in an error."""
_NUM_THREADS = 4
"""That read images at a time; decoding and resizing leave the interpreter to others."""
_ORIENTATION = 0x0112
"""The EXIF tag that says how an image is to be turned before it is looked at."""
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""PIL's names of what the values of that tag ask for (EXIF 2.32, section 4.6.4); others ask for nothing."""
_ROTATED = range(5, 9)
"""Orientations under which height and width change places."""
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
"""Modes with 8 bits a channel. Of 16 or 32 bits PIL would keep the lowest values and make the others white."""


class ImageReader:
    """Prepares images as one model's own processor does."""

    def __init__(self, processor: ImageProcessor[Any]) -> None:
        self._processor = processor

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Reads it from a model folder; None if that does not say how to prepare images for its tower.

        Raises:
            ModelError: the image processor cannot be loaded, is none for this tower, or leaves images in the size that
                they have.
        """
        path = next((folder / name for name, key in _CONFIGS.items() if read_keys(folder / name, key)), None)
        tower = None if path is None else tower_of(read_model_config(folder))
        if path is None or tower is None:
            return None
        from transformers import AutoImageProcessor

        try:
            # The other backend needs torchvision, and resizes to slightly other numbers.
            found = AutoImageProcessor.from_pretrained(folder, backend="pil")
        except (ImportError, ValueError, TypeError, OSError) as error:
            raise ModelError(
                f"{path}: the image processor cannot be loaded ({in_one_line(error)[:300]}); it needs the "
                "package pillow (pip install pillow), and that of LFM2-VL torchvision too"
            ) from None
        try:
            processor = image_processor_for(tower, found)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        except TypeError as error:
            raise ModelError(
                f"{path}: a value is of another kind than the image processor takes ({error}); take the file that "
                "belongs to the model"
            ) from None
        if not found.do_resize:
            raise ModelError(f"{path}: do_resize=false is not supported, for images come in all sizes; set it to true")
        return cls(processor)

    @classmethod
    def load_unless_unusable(cls, folder: Path) -> "ImageReader | None":
        """As `load`, but for a folder whose image processor cannot be used: that stops whoever reads an image, and
        nobody who reads words alone."""
        try:
            return cls.load(folder)
        except ModelError as error:
            return UnusableReader(str(error))

    def difference(self, other: "ImageReader") -> str | None:
        """Why what this prepares is not what `other` would, as the end of a sentence about its model; None if both make
        the same of every picture."""
        tower, others_tower = self._processor.tower, other._processor.tower
        if tower != others_tower:
            return f"has another vision tower ({others_tower}, not {tower}); use a model of the same family"
        own, others = self._processor.settings, other._processor.settings
        for key in sorted(own.keys() | others.keys()):
            if own.get(key) != others.get(key):
                return (
                    f"prepares images with {key}={others.get(key)}, and the model whose tokens it reads with "
                    f"{key}={own.get(key)}; give both folders the same file of the image processor"
                )
        return None

    def open(self, cell: Any, folder: Path, name: str) -> ImageRef:
        """An image by its size.

        Args:
            cell: how a row names it: by its path, as the bytes of a file, as `{"bytes": ..., "path": ...}` (the form of
                datasets), or as a PIL image.
            folder: that relative paths start from.
            name: of the image, for errors.
        Raises:
            DataError: it is missing, damaged, empty, too large or too narrow, or has more than 8 bits a channel.
        """
        from PIL.Image import Image

        source: str | bytes
        match cell:
            case {"bytes": bytes(data)} | bytes(data):
                source = data
            case str(given) | {"path": str(given)}:
                if given.startswith("data:"):
                    raise DataError(
                        f"{name}: {_shown(given)!r} is a data URL; decode it, and give a file's path or bytes"
                    )
                if given.startswith("file://"):
                    raise DataError(f"{name}: {_shown(given)!r} is a URL; give the path alone, without file://")
                if "://" in given:
                    raise DataError(
                        f"{name}: {_shown(given)!r} is a URL; download the image and give its path or bytes"
                    )
                source, name = str(folder / given), f"{name} ({_shown(given)})"
            case Image():
                source = _stored(cell, name)
            case _:
                raise DataError(
                    f"{name} is {describe_type(cell)}, expected a path, the bytes of a file, "
                    f'{{"bytes": ..., "path": ...}} or a PIL image: {preview(cell)}'
                )
        with _opened(source, name) as image:
            width, height = _size(image, name)
        try:
            extent = self._processor.measure(width, height)
        except ValueError as error:
            raise DataError(f"{name} has {width} x {height} pixels: {error}, or remove the row") from None
        if 0 in extent.size:
            raise DataError(
                f"{name} has {width} x {height} pixels, of which the image processor makes "
                f"{' x '.join(map(str, extent.size))}: nothing to see; scale or crop it, or remove the row"
            )
        return ImageRef(
            name=name,
            path=source if isinstance(source, str) else None,
            data=None if isinstance(source, str) else torch.frombuffer(bytearray(source), dtype=torch.uint8),
            num_patches=extent.num_patches,
            num_tokens=extent.num_tokens,
            size=extent.size,
        )

    def together(self, image_refs: list[ImageRef]) -> list[ImageRef]:
        """Returns what becomes of the images of one conversation."""
        return [self._processor.beside_others(one) for one in image_refs] if len(image_refs) > 1 else image_refs

    def mark(self, tokens: ImageTokens) -> str:
        """See `ImageProcessor.mark`."""
        return self._processor.mark(tokens)

    def as_read(self, text: str, tokens: ImageTokens) -> str:
        """See `ImageProcessor.as_read`."""
        return self._processor.as_read(text, tokens)

    def placeholder(self, image_ref: ImageRef, tokens: ImageTokens) -> list[int]:
        """See `ImageProcessor.placeholder`."""
        return self._processor.placeholder(image_ref, tokens)

    def read(self, image_refs: Sequence[ImageRef]) -> Images:
        """At least one.

        Raises:
            DataError: one cannot be decoded, or is not there any more; names row and file.
        """
        with ThreadPoolExecutor(min(_NUM_THREADS, len(image_refs))) as threads:
            found = list(threads.map(self._read, image_refs))
        return Images.joined(found)

    def _read(self, image_ref: ImageRef) -> Images:
        pixels, size = self._processor.patches_of(_decoded(image_ref), image_ref)
        if size != image_ref.size:
            raise DataError(f"{image_ref.name} has another size than when the rows were read; leave it alone meanwhile")
        return Images(
            pixel_values=pixels,
            num_patches=torch.tensor([image_ref.num_patches]),
            num_tokens=torch.tensor([image_ref.num_tokens]),
            sizes=torch.tensor([size]),
        )


class UnusableReader(ImageReader):
    """Stands in for the reader of a folder whose image processor cannot be used."""

    def __init__(self, reason: str) -> None:
        """`reason`: why it cannot, and what to do about it."""
        self._reason = reason

    def open(self, cell: Any, folder: Path, name: str) -> ImageRef:
        """Raises DataError."""
        raise DataError(f"{name}: {self._reason}")

    def read(self, image_refs: Sequence[ImageRef]) -> Images:
        """Raises DataError."""
        raise DataError(f"{image_refs[0].name}: {self._reason}")


def file_of(image_ref: ImageRef) -> str | bytes:
    """The path of an image, or the bytes of its file."""
    if image_ref.data is not None:
        return image_ref.data.numpy().tobytes()
    assert image_ref.path is not None
    return image_ref.path


_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
_TRANSPARENT = {"La": "LA", "PA": "RGBA", "RGBa": "RGBA"}
"""Those with transparency that PNG does not have, and what keeps it."""


def _stored(image: "Image", name: str) -> bytes:
    """A file of it that loses nothing the model sees. Raises DataError: as `_size` and `_load`."""
    _size(image, name)
    _load(image, name)
    file = io.BytesIO()
    upright = _upright(image, _orientation(image, name))
    lossless = upright if upright.mode in _PNG_MODES else upright.convert(_TRANSPARENT.get(upright.mode, "RGB"))
    lossless.save(file, "PNG")
    return file.getvalue()


def _opened(source: str | bytes, name: str) -> "Image":
    """Not decoded yet."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(source if isinstance(source, str) else io.BytesIO(source), formats=FORMATS)
    except IsADirectoryError:
        raise DataError(f"{name}: {source!r} is a folder; give the path of an image file in it") from None
    except UnidentifiedImageError:
        raise DataError(f"{name} is damaged, or no image: none of {', '.join(FORMATS)} can be read there") from None
    except Image.DecompressionBombError:  # of more than twice as many, without saying how high and wide
        raise DataError(f"{name} has more than the {MAX_PIXELS:,} pixels that are read; scale it down") from None
    except (OSError, ValueError, SyntaxError) as error:
        if isinstance(error, OSError) and error.errno in (ENOENT, ENAMETOOLONG):
            raise DataError(
                f"{name}: there is no file {_shown(str(source))!r}; give a path from the data file's folder, or bytes "
                "(base64 has to be decoded into them)"
            ) from None
        raise DataError(f"{name} cannot be read: {error}; fix it or remove the row") from None


def _shown(text: str) -> str:
    """A path as it is; of what is longer than any, such as base64, the beginning."""
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:60]}..."


def _size(image: "Image", name: str) -> tuple[int, int]:
    """Width and height as it is looked at."""
    width, height = image.size
    if not width * height:
        raise DataError(f"{name} has {width} x {height} pixels, and nothing to see; replace it or remove the row")
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{name} has {width} x {height} pixels, more than the {MAX_PIXELS:,} that are read; scale it down"
        )
    if max(width, height) > MAX_PROPORTION * min(width, height):
        raise DataError(
            f"{name} has {width} x {height} pixels, sides of more than the 1 to {MAX_PROPORTION} that are read; crop "
            "it or remove the row"
        )
    if image.mode not in _MODES:
        raise DataError(
            f"{name} has the mode {image.mode}, more than 8 bits a channel, which would be cut off rather than scaled; "
            "save it with 8 bits"
        )
    return (height, width) if _orientation(image, name) in _ROTATED else (width, height)


def _orientation(image: "Image", name: str) -> Any:
    """What its EXIF data say, or None. Those behind the pixels of a PNG are left out: PIL would have to decode it."""
    if image.format == "PNG" and "exif" not in image.info:
        return None
    try:
        return image.getexif().get(_ORIENTATION)
    except (OSError, ValueError, SyntaxError, TypeError, struct.error) as error:
        raise DataError(
            f"{name}: its EXIF data are damaged ({error}), so it is not known which side is up; save it without "
            "them or remove the row"
        ) from None


def _upright(image: "Image", orientation: Any) -> "Image":
    """PIL's own way would also write the EXIF data anew, which it cannot do with all that it can read."""
    from PIL.Image import Transpose

    turn = _TURNS.get(orientation)
    return image.copy() if turn is None else image.transpose(Transpose[turn])


def _decoded(image_ref: ImageRef) -> "Image":
    """As it is looked at."""
    with _opened(file_of(image_ref), image_ref.name) as image:
        _size(image, image_ref.name)  # of a file that may have changed since it was opened
        orientation = _orientation(image, image_ref.name)  # as its size was told: decoding may find another
        _load(image, image_ref.name)
        return _upright(image, orientation)


def _load(image: "Image", name: str) -> None:
    """Decodes it in place. Raises DataError: it breaks off, or is damaged otherwise."""
    try:
        image.load()
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{name} is damaged: {error}; replace it or remove the row") from None
