"""Images of rows: where they stand among the words, how many tokens they take, and the pixels once a batch needs them.

A row names an image by its path, as the bytes of a file, as `{"bytes": ..., "path": ...}` (the form of datasets), or
has a PIL image. With the rows it is opened, which tells its size, and decoded only when a batch is made of it.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from shardwise.config import DataError, ModelError
from shardwise.data.chat import render_text
from shardwise.data.sources import Row, describe_type, get_cell, has_column, preview, without_nulls
from shardwise.types import Images, Sample

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "<image>"
"""Stands for an image in a content that is a string."""
FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 89_478_485
"""Of an image as it is stored: where PIL begins to warn of files that are made to fill the memory."""
_ROTATED = range(5, 9)
"""Values of the EXIF orientation under which height and width change places."""
_ORIENTATION = 0x0112
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
"""Those with 8 bits a channel. Of 16 or 32 bits PIL would keep the lowest values and make the others white."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One image of a row, not decoded yet."""

    source: "Path | bytes | Image"
    name: str
    """For errors: its row, its number in it and its file."""
    grid: tuple[int, int, int]
    """Patches in time, height and width."""
    num_tokens: int


class Vision:
    """How one model is shown images: its processor's preprocessing, its tokens and its positions."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        processor: Any,
        image_token_id: int,
        rope_index: Callable[..., tuple[Tensor, Tensor]],
    ) -> None:
        """
        Args:
            processor: transformers' image processor of the model.
            image_token_id: stands for a part of an image.
            rope_index: the model's get_rope_index.
        """
        self._tokenizer = tokenizer
        self._processor = processor
        self._image_token_id = image_token_id
        self._rope_index = rope_index
        self._text: str | None = None

    @classmethod
    def load(cls, folder: Path, tokenizer: "PreTrainedTokenizerBase") -> Self | None:
        """Of a model folder; None where the model sees no images, or the folder does not say how they are prepared.

        Raises:
            ModelError: the image processor cannot be loaded, or is not one of Qwen's.
        """
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

        config = AutoConfig.from_pretrained(folder)
        if "vision_config" not in config.sub_configs or not (folder / "preprocessor_config.json").is_file():
            return None
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config).base_model
        if not hasattr(model, "get_rope_index"):
            return None
        try:
            # The other backend needs torchvision, and resizes to slightly other numbers.
            processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        except (ImportError, ValueError, OSError) as error:
            raise ModelError(
                f"{folder / 'preprocessor_config.json'}: the image processor cannot be loaded "
                f"({' '.join(str(error).split())[:300]}); it needs the package pillow (pip install shardwise[vision])"
            ) from None
        if not (hasattr(processor, "merge_size") and processor.do_resize):
            raise ModelError(
                f"{folder / 'preprocessor_config.json'}: {type(processor).__name__} with do_resize="
                f"{processor.do_resize} is not supported; use the file that belongs to a Qwen2.5-VL or Qwen3-VL model"
            )
        return cls(tokenizer, processor, config.image_token_id, model.get_rope_index)

    def take(self, messages: Any, row: Row, images_column: str) -> tuple[Any, list[Picture]]:
        """The images of a conversation, or of a prompt that is a string, and the words with what the chat template
        writes for an image in the place of each.

        Args:
            messages: as the row has them. A content is a string with a PLACEHOLDER for each image, or a list of
                `{"type": "text", "text": ...}` and `{"type": "image"}`; `{"type": "image", "image": ...}` has an image
                of its own, the others take those of the column in their order.
        Raises:
            DataError: an image that is missing, damaged or too large; more images than places for them, or fewer.
            ModelError: the chat template has no images.
        """
        taking = _Taking(self, row, images_column)
        if isinstance(messages, str):
            return taking.text(messages), taking.finish()
        if not isinstance(messages, list):
            return messages, []
        return [taking.message(message) for message in messages], taking.finish()

    def expand(
        self, tokens: list[int], loss_mask: list[bool], pictures: Sequence[Picture], origin: str
    ) -> tuple[list[int], list[bool]]:
        """The sequence with as many tokens for each image as it takes, none of which is trained.

        Raises:
            DataError: a message writes the image token itself.
        """
        found = tokens.count(self._image_token_id)
        if found != len(pictures):
            token = self._tokenizer.decode([self._image_token_id])
            raise DataError(
                f"{origin}: the text has {found} times {token!r} for {len(pictures)} images, so a message writes it "
                f"itself; write {PLACEHOLDER} for an image, and leave the model's own token out"
            )
        counts = iter(pictures)
        expanded: list[int] = []
        mask: list[bool] = []
        for token_id, is_trained in zip(tokens, loss_mask, strict=True):
            is_image = token_id == self._image_token_id
            count = next(counts).num_tokens if is_image else 1
            expanded += [token_id] * count
            mask += [is_trained and not is_image] * count
        return expanded, mask

    def whole(self, tokens: list[int], pictures: Sequence[Picture]) -> tuple[int, list[Picture]]:
        """Of a sequence whose end was cut off: how many of its tokens end before an image that was cut in two, and the
        images that are whole."""
        left = tokens.count(self._image_token_id)
        kept: list[Picture] = []
        for picture in pictures:
            if picture.num_tokens > left:
                return len(tokens) - left, kept  # what is left of it stands at the end
            kept.append(picture)
            left -= picture.num_tokens
        return len(tokens), kept

    def position_ids(self, token_ids: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """[L] -> [3, L]: where each token is in time, height and width, as the model itself counts."""
        kinds = (token_ids == self._image_token_id).int()
        positions, _ = self._rope_index(token_ids[None], kinds[None], image_grid_thw=torch.tensor(grids))
        return positions[:, 0]

    def read(self, pictures: Sequence[Picture]) -> Images:
        """The images of one sequence as the processor makes them.

        Raises:
            DataError: one cannot be decoded, or is not there any more.
        """
        found = self._processor(
            images=[_decoded(picture) for picture in pictures], do_convert_rgb=True, return_tensors="pt"
        )
        grids = [tuple(grid) for grid in found["image_grid_thw"].tolist()]
        assert grids == [picture.grid for picture in pictures], (grids, pictures)
        return Images(pixel_values=found["pixel_values"], image_grid_thw=found["image_grid_thw"])

    def open(self, cell: Any, folder: Path, name: str) -> Picture:
        """An image by its size.

        Args:
            cell: how a row names it.
            folder: that relative paths start from.
            name: of the image, for errors.
        """
        from PIL.Image import Image

        match cell:
            case {"bytes": bytes(data)} | bytes(data):
                source: Path | bytes | Image = data
            case str(path) | {"path": str(path)}:
                if "://" in path or path.startswith("data:"):
                    raise DataError(
                        f"{name}: {path[:80]!r} is a URL; download the image and give its path or its bytes"
                    )
                source, name = folder / path.removeprefix("file:"), f"{name} ({path})"
            case Image():
                source = cell
            case _:
                raise DataError(
                    f"{name} is {describe_type(cell)}, expected a path, the bytes of a file, "
                    f'{{"bytes": ..., "path": ...}} or a PIL image: {preview(cell)}'
                )
        width, height = _size(source, name)
        grid = self._grid(width, height, name)
        return Picture(source, name, grid, grid[0] * grid[1] * grid[2] // self._processor.merge_size**2)

    def _grid(self, width: int, height: int, name: str) -> tuple[int, int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        processor = self._processor
        try:
            resized = smart_resize(
                height,
                width,
                factor=processor.patch_size * processor.merge_size,
                min_pixels=processor.size["shortest_edge"],
                max_pixels=processor.size["longest_edge"],
            )
        except ValueError as error:
            raise DataError(f"{name} has {width} x {height} pixels: {error}; crop it or remove the row") from None
        return 1, resized[0] // processor.patch_size, resized[1] // processor.patch_size

    @property
    def image_text(self) -> str:
        """What the chat template writes for an image, whatever stands around it."""
        if self._text is None:
            self._text = self._find_text()
        return self._text

    def _find_text(self) -> str:
        first, second = "<[before]>", "<[behind]>"

        def render(content: Any) -> str:
            return render_text(self._tokenizer, [{"role": "user", "content": content}], "an image")

        words = [{"type": "text", "text": first}, {"type": "image"}, {"type": "text", "text": second}]
        found = ""
        with suppress(DataError, TypeError):  # of a template that takes every content for a string
            text = render(words)
            between = text.partition(first)[2].partition(second)[0]
            found = between if text == render(first + between + second) else ""
        if self._tokenizer.encode(found, add_special_tokens=False).count(self._image_token_id) != 1:
            raise ModelError(
                f"the chat template of {self._tokenizer.name_or_path} writes {found!r} for an image, without the one "
                f"{self._tokenizer.decode([self._image_token_id])!r} that the model looks for; set "
                "model.chat_template=FILE to the one that belongs to the model"
            )
        return found


class _Taking:
    """Goes through the messages of a row once, and gives out its images one by one."""

    def __init__(self, vision: Vision, row: Row, images_column: str) -> None:
        self._vision = vision
        self._row = row
        self._column = images_column
        self._cells = row_images(row, images_column)
        self._pictures: list[Picture] = []
        self._num_from_column = 0

    def message(self, message: Any) -> Any:
        """With a content that is a string."""
        match message:
            case {"content": str(text)}:
                return {**message, "content": self.text(text)}
            case {"content": list(parts)}:
                return {**message, "content": "".join(self._part(without_nulls(part)) for part in parts)}
        return message

    def text(self, text: str) -> str:
        before, *rest = text.split(PLACEHOLDER)
        return before + "".join(self._next() + words for words in rest)

    def finish(self) -> list[Picture]:
        """All of them."""
        if self._num_from_column != len(self._cells):
            raise DataError(
                f'{self._row.origin}: column "{self._column}" has {len(self._cells)} images, and the messages have '
                f"places for {self._num_from_column}: {PLACEHOLDER} in a string, or {{"
                '"type": "image"} in a list; give as many as there are images'
            )
        return self._pictures

    def _part(self, part: Any) -> str:
        match part:
            case {"type": "text", "text": str(text)}:
                return text
            case {"type": "image", "image": cell} | {"type": "image", "path": cell}:
                return self._add(cell)
            case {"type": "image", "bytes": data}:
                return self._add(data)
            case {"type": "image"}:
                return self._next()
        raise DataError(
            f'{self._row.origin}: a part of a content is {preview(part)}, expected {{"type": "text", "text": ...}} or '
            '{"type": "image"}, with its "image" or without'
        )

    def _next(self) -> str:
        place = self._num_from_column
        self._num_from_column += 1
        if place >= len(self._cells):
            return self._vision.image_text  # `finish` says how many there are
        return self._add(self._cells[place])

    def _add(self, cell: Any) -> str:
        name = f"{self._row.origin}: image {len(self._pictures) + 1}"
        self._pictures.append(self._vision.open(cell, self._row.folder, name))
        return self._vision.image_text


@dataclass(frozen=True, slots=True)
class Album:
    """The images of rows."""

    vision: Vision
    pictures: Mapping[str, Sequence[Picture]]
    """By the uid of a sample, of those that have any."""

    def shown(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their images read.

        Raises:
            DataError: an image cannot be decoded; names row and file.
        """
        return [
            replace(sample, images=self.vision.read(self.pictures[sample.uid]))
            if sample.uid in self.pictures
            else sample
            for sample in samples
        ]


def row_images(row: Row, column: str) -> list[Any]:
    """What a row has in the column of images; one by itself is a list of one."""
    cell = get_cell(row, column) if has_column(row, column) else []
    return cell if isinstance(cell, list) else [cell]


def _opened(source: "Path | bytes | Image", name: str) -> "Image":
    """Not decoded yet."""
    from PIL import Image, UnidentifiedImageError

    try:
        match source:
            case Path():
                return Image.open(source, formats=FORMATS)
            case bytes():
                return Image.open(io.BytesIO(source), formats=FORMATS)
        return source
    except FileNotFoundError:
        raise DataError(f"{name}: there is no file {str(source)!r}; give a path from the data file's folder") from None
    except UnidentifiedImageError:
        raise DataError(f"{name} is damaged, or no image: none of {', '.join(FORMATS)} can be read there") from None
    except Image.DecompressionBombError as error:
        raise DataError(f"{name}: {error}; scale it down") from None
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{name} cannot be read: {error}; fix it or remove the row") from None


def _size(source: "Path | bytes | Image", name: str) -> tuple[int, int]:
    """Width and height as it is looked at."""
    image = _opened(source, name)
    width, height = image.size
    try:
        if width * height > MAX_PIXELS:
            raise DataError(
                f"{name} has {width} x {height} pixels, more than the {MAX_PIXELS:,} that are read; scale it down"
            )
        if image.mode not in _MODES:
            raise DataError(
                f"{name} has the mode {image.mode}, more than 8 bits a channel, which would be cut off rather than "
                "scaled; save it with 8 bits"
            )
        return (height, width) if _is_rotated(image) else (width, height)
    finally:
        if image is not source:
            image.close()


def _is_rotated(image: "Image") -> bool:
    return _has_orientation(image) and image.getexif().get(_ORIENTATION) in _ROTATED


def _has_orientation(image: "Image") -> bool:
    """PIL finds that of a PNG only by decoding it, and cameras write none."""
    return image.format in ("JPEG", "MPO", "WEBP")


def _decoded(picture: Picture) -> "Image":
    """As it is looked at."""
    from PIL import ImageOps

    image = _opened(picture.source, picture.name)
    try:
        image.load()
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{picture.name} is damaged: {error}; replace it or remove the row") from None
    return ImageOps.exif_transpose(image) if _has_orientation(image) else image
