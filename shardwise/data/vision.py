"""Images among words: where they stand in a row, how many tokens each takes, and where the model places them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.config import DataError, ModelError
from shardwise.data.image_tokens import ImageTokens
from shardwise.data.images import ImageReader
from shardwise.data.messages import Message
from shardwise.data.sources import Row, get_cell, has_column, preview, without_nulls
from shardwise.data.template_forms import IMAGE, ImageForm, Part, image_form, text_part
from shardwise.families import finds_positions, vision_reason
from shardwise.types import ImageRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "<image>"
"""The text that stands for an image in a content that is a string."""
_SOURCES = {"image", "path", "url", "bytes"}
"""The keys under which a part may have an image of its own, in a form that `ImageReader.open` takes."""
_SAMPLE_SIZE = (300, 200)
"""Width and height of an image that every model takes."""


class Vision:
    """How the rows of one model's training show it images."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        reader: ImageReader,
        tokens: ImageTokens,
        rope_index: Callable[..., tuple[Tensor, Tensor]] | None,
    ) -> None:
        """
        Args:
            tokens: those that the model's processor writes.
            rope_index: the model's get_rope_index; None where the tokens of images are counted like words.
        """
        self._tokenizer = tokenizer
        self._reader = reader
        self._tokens = tokens
        self._rope_index = rope_index

    @classmethod
    def load(cls, folder: Path, tokenizer: "PreTrainedTokenizerBase") -> "Vision | None":
        """Reads it from a model folder; None if the model sees no images or the folder does not say how to prepare any.
        Where the image processor cannot be used, the model learns from words alone."""
        from transformers import AutoModelForImageTextToText

        from shardwise.model_config import blaming_config, read_model_config

        config = read_model_config(folder)
        if type(config) not in AutoModelForImageTextToText._model_mapping:
            return None
        with blaming_config(folder, "ImageTextToText"), torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
        if reason := vision_reason(model):
            return WordsAlone(
                f"the family {config.model_type} learns from words alone ({reason}; docs/vision.md names the families "
                "that learn from images); use a model of one of them"
            )
        try:
            reader = ImageReader.load(folder)
        except ModelError as error:
            return UnusableProcessor(str(error))
        if reader is None:
            return None
        tokens = ImageTokens(folder, tokenizer, config.image_token_id)
        rope_index = model.base_model.get_rope_index if finds_positions(model) else None
        return cls(tokenizer, reader, tokens, rope_index)

    def take(
        self, messages: Any, row: Row, images_column: str, *, num_context: int | None = None
    ) -> tuple[Any, list[ImageRef]]:
        """The images of a conversation, or of a prompt that is a string, and the messages with parts for them.

        Args:
            messages: as the row has them. A content is a string with a PLACEHOLDER for each image, or a list of
                `{"type": "text", "text": ...}` and `{"type": "image"}`; `{"type": "image", "image": ...}` (or "path",
                "url", "bytes") has an image of its own, the others take those of the column in their order.
            num_context: how many of the messages may have images: those that the others answer; None: all.
        Returns:
            The messages and the images. A content that was a list, or has an image, is a list of parts as chat
            templates take them; a prompt with an image becomes a user's message.
        Raises:
            DataError: an image that is missing, damaged or too large; more images than places for them, or fewer; a
                place behind the context.
            ModelError: the chat template has no images.
        """
        taking = _Taking(self, row, images_column)
        if isinstance(messages, str):
            content = taking.text(messages)
            said = content if isinstance(content, str) else [{"role": "user", "content": content}]
            return said, taking.finish()
        if not isinstance(messages, list):
            return messages, []
        words = [taking.message(message) for message in messages[:num_context]]
        if num_context is not None:
            taking.is_over = True
            words += [taking.message(message) for message in messages[num_context:]]
        return words, taking.finish()

    def as_read(self, text: str) -> str:
        """What is tokenized of a rendered text: with the token of images once for each, and what the model's processor
        writes around it."""
        with suppress(ModelError):  # `image_form` says of a row with an image what the tokenizer does not name
            return self._reader.as_read(text, self._tokens)
        return text

    def expand(
        self, tokens: list[int], loss_mask: list[bool], image_refs: Sequence[ImageRef], origin: str
    ) -> tuple[list[int], list[bool]]:
        """The sequence with the tokens that stand for each image, none of which is trained.

        Raises:
            DataError: a message writes the image token itself, or nothing stands between two images that
                `position_ids` would then take for one.
        """
        places = [place for place, token_id in enumerate(tokens) if token_id == self.image_token_id]
        if len(places) != len(image_refs):
            advice = (
                "text part or tool call spells it; remove it there"
                if self._tokens.image == PLACEHOLDER  # LLaVA's, which stands for an image in a string
                else f"message writes it itself; write {PLACEHOLDER} for an image, and leave the model's own token out"
            )
            raise DataError(
                f"{origin}: the text has {len(places)} times {self._spelt} for {len(image_refs)} images, so a {advice}"
            )
        for number, (place, following) in enumerate(pairwise(places), start=1):
            if following == place + 1 and self.finds_positions:
                raise DataError(
                    f"{origin}: nothing stands between image {number} and image {number + 1}, which the model cannot "
                    "tell apart then; set model.chat_template=FILE to a template that writes a mark around every "
                    "image, or put words between them"
                )
        placeholders = (self._reader.placeholder(image_ref, self._tokens) for image_ref in image_refs)
        expanded: list[int] = []
        mask: list[bool] = []
        for token_id, is_trained in zip(tokens, loss_mask, strict=True):
            is_image = token_id == self.image_token_id
            inserted = next(placeholders) if is_image else [token_id]
            expanded += inserted
            mask += [is_trained and not is_image] * len(inserted)
        return expanded, mask

    def within(self, tokens: list[int], image_refs: Sequence[ImageRef]) -> list[ImageRef]:
        """The images that are left of a sequence whose end was cut off behind words: those that stand before."""
        num_tokens = tokens.count(self.image_token_id)
        ends = accumulate(image_ref.num_tokens for image_ref in image_refs)
        return [image_ref for image_ref, end in zip(image_refs, ends, strict=True) if end <= num_tokens]

    @property
    def finds_positions(self) -> bool:
        """Whether the model itself says where the tokens of images are; else they are counted like words."""
        return self._rope_index is not None

    def position_ids(self, token_ids: Tensor, image_refs: Sequence[ImageRef]) -> Tensor | None:
        """[L] -> [3, L]: where each token is in time, height and width, as the model itself counts; None if it counts
        all of them like words."""
        if self._rope_index is None:
            return None
        kinds = (token_ids == self.image_token_id).int()
        grids = torch.tensor([image_ref.size for image_ref in image_refs])
        positions, _ = self._rope_index(token_ids[None], kinds[None], image_grid_thw=grids)
        return positions[:, 0]

    @property
    def image_token_id(self) -> int:
        """What stands for a part of an image."""
        return self._tokens.image_id

    def open(self, cell: Any, folder: Path, name: str) -> ImageRef:
        """See `ImageReader.open`."""
        return self._reader.open(cell, folder, name)

    def together(self, image_refs: list[ImageRef]) -> list[ImageRef]:
        """See `ImageReader.together`."""
        return self._reader.together(image_refs)

    @property
    def _spelt(self) -> str:
        """What no row may spell, for errors."""
        found = [self._tokens.image]
        with suppress(ModelError):
            found.insert(0, self._reader.mark(self._tokens))
        return " or ".join(map(repr, dict.fromkeys(found)))

    @property
    def way_to_spell(self) -> str:
        """The end of an error: how a row spells PLACEHOLDER where it means no image. Empty where it is the model's own
        token of images, which no row may spell."""
        if self._tokens.image == PLACEHOLDER:
            return ""
        part = f'{{"type": "text", "text": "{PLACEHOLDER}"}}'
        return f'. Where {PLACEHOLDER} is text, give the message as {{"role": ..., "content": [{part}]}}'

    def difference(self, other: "Vision | None") -> str | None:
        """Why another model, which reads the tokens of this one, cannot be shown its images, as the end of a sentence
        about it; None if it is shown the same pixels in the same places.

        Args:
            other: how that model is shown images.
        """
        if other is None:
            return "sees no images, for its folder has no vision tower or no image processor; use one that sees them"
        if isinstance(other, WordsAlone):
            return f"is shown none: {other.reason}"
        if found := self._reader.difference(other._reader):
            return found
        try:  # words alone are read without what is missing
            own = self._placed_sample()
        except (DataError, ModelError) as error:
            return f"is shown none, for the model whose tokens it reads places none: {error}"
        try:
            others = other._placed_sample()
        except (DataError, ModelError) as error:
            return f"is shown none: {error}"
        if not torch.equal(own[0], others[0]):
            return "writes other tokens for an image; use a model of the same family"
        if not torch.equal(own[1], others[1]):
            return "counts the places of an image's tokens in another way; use a model of the same family"
        return None

    def require_places(self) -> None:
        """Raises ModelError: the chat template writes no image, or the tokenizer has no token for a mark of one. It
        would otherwise be raised for the first row that has an image."""
        _ = self.image_form
        self._placed_sample()

    def _placed_sample(self) -> tuple[Tensor, Tensor]:
        """The tokens of an image between words, and their positions."""
        from PIL import Image

        image_ref = self.open(Image.new("RGB", _SAMPLE_SIZE), Path(), "a sample image")
        tokens = torch.tensor([0, *self._reader.placeholder(image_ref, self._tokens), 0])
        positions = self.position_ids(tokens, [image_ref])
        return tokens, torch.arange(len(tokens)) if positions is None else positions

    @cached_property
    def image_form(self) -> ImageForm:
        """What the chat template makes of an image.

        Raises:
            ModelError: nothing that the model finds, or somewhere else than where rows may have it.
        """
        form = ImageForm("", "elsewhere")
        with suppress(ValueError):  # the tokenizer has no chat template
            form = image_form(self._tokenizer, self._tokenizer.get_chat_template())
        template = f"the chat template of {self._tokenizer.name_or_path} writes {form.text!r} for an image"
        mark, read = self._reader.mark(self._tokens), self._reader.as_read(form.text, self._tokens)
        num_read = self._tokenizer.encode(read, add_special_tokens=False).count(self.image_token_id)
        if mark not in form.text or num_read != 1:
            raise ModelError(
                f"{template}, without the one {mark!r} that the model looks "
                "for; set model.chat_template=FILE to the one that belongs to the model"
            )
        if form.place == "elsewhere":
            raise ModelError(
                f"{template}, but neither where it stands in its message nor in front of the words; set "
                "model.chat_template=FILE to one that does"
            )
        return form


class WordsAlone(Vision):
    """Stands in for the Vision of a model that cannot be shown images here: it learns from words alone."""

    def __init__(self, reason: str) -> None:
        """`reason`: why, and what to do about it, for errors."""
        self.reason = reason

    def difference(self, other: Vision | None) -> str | None:
        """None: there are no images to show."""
        return None

    def require_places(self) -> None:
        """Requires none."""

    def take(
        self, messages: Any, row: Row, images_column: str, *, num_context: int | None = None
    ) -> tuple[Any, list[ImageRef]]:
        """The messages, whose parts are all text.

        Raises:
            DataError: the row has an image, or another part that is no text.
        """
        if any(cell is not None for cell in row_images(row, images_column)):
            raise self._refusal(row, f'has images in its column "{images_column}"')
        return in_words(messages, lambda part: self._refusal(row, f"has {preview(part)} in a content")), []

    def _refusal(self, row: Row, what: str) -> DataError:
        return DataError(
            f"{row.origin}: the row {what}, and {self.reason}, or leave all but text out of messages, and set "
            "data.images_column to a column that is not there"
        )

    def as_read(self, text: str) -> str:
        """Returns the text as it is."""
        return text

    def expand(
        self, tokens: list[int], loss_mask: list[bool], image_refs: Sequence[ImageRef], origin: str
    ) -> tuple[list[int], list[bool]]:
        """Returns the sequence as it is."""
        return tokens, loss_mask

    @property
    def image_token_id(self) -> int:
        """That of no token, for none may be in a text."""
        return -1


class UnusableProcessor(WordsAlone):
    """Stands in for the Vision of a model that sees images, but whose image processor cannot be used."""


class _Taking:
    """Goes through the messages of a row once, and gives out its images one by one."""

    def __init__(self, vision: Vision, row: Row, images_column: str) -> None:
        self._vision = vision
        self._row = row
        self._column = images_column
        self._cells = row_images(row, images_column)
        self._image_refs: list[ImageRef] = []
        self._num_from_column = 0
        self.is_over = False
        """Whether no image may follow, for what follows are answers."""

    def message(self, message: Any) -> Any:
        """With parts for its images."""
        match message:
            case {"content": str(text)}:
                return {**message, "content": self.text(text)}
            case {"content": list(parts)}:
                return {**message, "content": self._placed([self._part(without_nulls(part)) for part in parts])}
        return message

    def text(self, text: str) -> str | list[Part]:
        """A content that is a string: in parts if it has an image. A line that ends behind an image ends once: there
        the template may end it itself."""
        before, *rest = text.split(PLACEHOLDER)
        if not rest:
            return text
        parts = [text_part(before)]
        for words in rest:
            parts.append(self._next())
            ends_line = self._vision.image_form.text.endswith("\n")
            parts.append(text_part(words.removeprefix("\n") if ends_line else words))
        return self._placed([part for part in parts if part.get("text") != ""])

    def finish(self) -> list[ImageRef]:
        """All of them."""
        if self._num_from_column != len(self._cells):
            raise DataError(
                f'{self._row.origin}: column "{self._column}" has {len(self._cells)} images, and the messages have '
                f"places for {self._num_from_column}: {PLACEHOLDER} in a string, or {{"
                f'"type": "image"}} in a list; give as many as there are images{self._vision.way_to_spell}'
            )
        return self._vision.together(self._image_refs)

    def _placed(self, parts: list[Part]) -> list[Part]:
        """The parts of a message, of which a template that writes images first would move none with words."""
        num_before_image = max((number for number, part in enumerate(parts) if part == IMAGE), default=0)
        words = "".join(part["text"] for part in parts[:num_before_image] if part != IMAGE)
        if words.strip() and self._vision.image_form.place == "in front":
            raise DataError(
                f"{self._row.origin}: words stand before an image, and the chat template writes all images of a "
                "message before its words; put the images first, or set model.chat_template=FILE to one that keeps "
                f"their places: {preview(parts)}"
            )
        return parts

    def _part(self, part: Any) -> Part:
        match part:
            case {"type": "text", "text": str(text)}:
                return text_part(text)
            case {"type": "image", **source} if not source:
                return self._next()
            case {"type": "image", **source} if len(source) == 1 and source.keys() <= _SOURCES:
                self._require_context()
                return self._add(*source.values())
        raise DataError(
            f'{self._row.origin}: a part of a content is {preview(part)}, expected {{"type": "text", "text": ...}} or '
            '{"type": "image"}, alone or with its image as "image", "path", "url" or "bytes"'
        )

    def _require_context(self) -> None:
        if self.is_over:
            raise DataError(
                f"{self._row.origin}: an answer, or what follows one, has a place for an image ({PLACEHOLDER} in a "
                'string, or {"type": "image"} in a list); images stand in the messages that are answered: move it '
                f"there, or remove it{self._vision.way_to_spell}"
            )

    def _next(self) -> Part:
        self._require_context()
        place = self._num_from_column
        self._num_from_column += 1
        if place >= len(self._cells):
            return IMAGE  # `finish` says how many there are
        return self._add(self._cells[place])

    def _add(self, cell: Any) -> Part:
        name = f"{self._row.origin}: image {len(self._image_refs) + 1}"
        self._image_refs.append(self._vision.open(cell, self._row.folder, name))
        return IMAGE


def as_written(taken: Sequence[Message], given: str | Sequence[Message]) -> list[Message]:
    """A prompt for the `take` of another model, whose template may end another line behind an image.

    Args:
        taken: messages as `take` returned them, maybe behind a system prompt of their own.
        given: the prompt that it took.
    Returns:
        The messages with every content that is a string as it was given. A system prompt that spells PLACEHOLDER is in
        parts, for it has no image.
    """
    said = [{"content": given}] if isinstance(given, str) else given
    num_added = len(taken) - len(said)
    added = [
        {**message, "content": [text_part(message["content"])]} if PLACEHOLDER in message["content"] else message
        for message in taken[:num_added]
    ]
    return added + [
        {**message, "content": one["content"]} if isinstance(one.get("content"), str) else message
        for message, one in zip(taken[num_added:], said, strict=True)
    ]


def in_words(messages: Any, refusal: Callable[[Any], DataError]) -> Any:
    """Messages, or a prompt that is a string, where no image is shown.

    Raises:
        DataError: `refusal` of a part that is no text.
    """

    def text_of(part: Any) -> Part:
        match plain := without_nulls(part):
            case {"type": "text", "text": str(text)}:
                return text_part(text)
        raise refusal(plain)

    def spoken(message: Any) -> Any:
        match message:
            case {"content": list(parts)}:
                return {**message, "content": [text_of(part) for part in parts]}
        return message

    return [spoken(message) for message in messages] if isinstance(messages, list) else messages


def row_images(row: Row, column: str) -> list[Any]:
    """What a row has in the column of images; one by itself is a list of one."""
    cell = get_cell(row, column) if has_column(row, column) else []
    return cell if isinstance(cell, list) else [cell]


def continued_positions(position_ids: Tensor | None, num_tokens: int) -> Tensor | None:
    """Extends [3, L] position ids of a prompt with images to [3, num_tokens]: text continues after the largest. None,
    of a prompt whose tokens are all counted like words, stays None."""
    if position_ids is None:
        return None
    num_more = num_tokens - position_ids.shape[1]
    more = position_ids.max() + 1 + torch.arange(num_more)
    return torch.cat([position_ids, more.expand(3, num_more)], dim=1)
