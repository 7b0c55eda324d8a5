"""How a chat template takes contents: words as strings or parts, several parts or one, images in place or in front."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from shardwise.data.messages import Message, ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Part = dict[str, Any]
"""A part of a content: `{"type": "text", "text": ...}` or IMAGE."""
IMAGE: Part = {"type": "image"}
_ANY_WORDS, _OTHER_WORDS, _BESIDE = "some words", "and others", "beside them"
_CONVERSATIONS = (("user",), ("user", "assistant", "user"), ("system", "user"))
"""Roles of the conversations that show how a template takes words; some take no other."""
_AROUND: dict[str, Sequence[tuple[Sequence[str], Sequence[str]]]] = {
    "system": [((), ("user",))],
    "user": [((), ()), (("user", "assistant"), ()), (("system",), ())],
    "assistant": [(("user",), ("user",)), (("user",), ())],
}
"""Role -> the roles before and behind it in conversations that show how a template takes its parts."""
_BEHIND_OTHERS = [(("user", "assistant"), ()), (("user",), ())]
"""The same for all other roles, such as tool."""
_ANY_TOOL: ToolSchema = {
    "type": "function",
    "function": {"name": "any", "description": "Any.", "parameters": {"type": "object", "properties": {}}},
}
"""A tool for a conversation that shows how a template takes parts beside tools."""
_LIST = re.compile(r"""['"]type['"]: ['"]text['"]""")
"""A list of parts that a template wrote as it is."""


@dataclass(frozen=True, slots=True)
class ImageForm:
    """What a chat template makes of an image in a user's message."""

    text: str
    """What it writes for it; "" if it takes none."""
    place: Literal["in place", "in front", "elsewhere"]
    """Where: where the image stands, or in front of all words of its message."""


def text_part(words: str) -> Part:
    """Returns words as a part of a content."""
    return {"type": "text", "text": words}


def formed(
    tokenizer: "PreTrainedTokenizerBase", template: str, message: Message, *, with_tools: bool = False
) -> Message:
    """Returns a message as the template takes it: words as a string or a part, and parts as they are, or else as one
    string, with what the template writes for an image in the place of each.

    Args:
        message: its content is a string or a list of Part.
        with_tools: the conversation offers tools.
    Raises:
        ValueError: the template writes no words.
    """
    content, form = message["content"], form_of_words(tokenizer, template)
    if isinstance(content, str):
        return {**message, "content": form(content)}
    if takes_parts(tokenizer, template, message["role"], with_image=IMAGE in content, with_tools=with_tools):
        return message
    return {**message, "content": form(joined(content, image_form(tokenizer, template).text))}


def joined(parts: Sequence[Part], image_text: str) -> str:
    """Returns a content as one string, with `image_text` in the place of each image."""
    return "".join(image_text if part == IMAGE else part["text"] for part in parts)


@lru_cache(maxsize=8)
def form_of_words(tokenizer: "PreTrainedTokenizerBase", template: str) -> Callable[[str], Any]:
    """Finds the form in which a chat template takes words: a string, or a list of one part, as LLaVA's do, which write
    the same whatever a string says. One that refuses all that is tried is given strings.

    Raises:
        ValueError: it writes words in neither form.
    """

    def told(form: Callable[[str], Any], roles: Sequence[str], words: str) -> str | None:
        return _written(tokenizer, template, [{"role": role, "content": form(words)} for role in roles])

    def tells(form: Callable[[str], Any]) -> list[bool]:
        """Whether other words are written as another text, and no list as it is, in each conversation that it takes."""
        texts = [(told(form, roles, _ANY_WORDS), told(form, roles, _OTHER_WORDS)) for roles in _CONVERSATIONS]
        return [one != other and "'type'" not in one for one, other in texts if one is not None]

    of_string = tells(str)
    if any(of_string):
        return str
    if any(tells(_one_part)):
        return _one_part
    if of_string:
        raise ValueError("it writes no word of a user's message, neither of a string nor of a list of parts")
    return str


@lru_cache(maxsize=64)
def takes_parts(
    tokenizer: "PreTrainedTokenizerBase", template: str, role: str, *, with_image: bool, with_tools: bool = False
) -> bool:
    """Finds whether a chat template writes all parts of a content with several in a message of this role, in every
    conversation in which it takes them as one string. Some take the first alone, some write the list itself, and some
    refuse it: everywhere, in the first message, or in the one that they write a system prompt or tools into.

    Args:
        with_tools: the conversation offers tools.
    Raises:
        ValueError: as `form_of_words`.
    """
    form, image = form_of_words(tokenizer, template), image_form(tokenizer, template).text
    content = [*([IMAGE] if with_image else []), text_part(_ANY_WORDS), text_part(_OTHER_WORDS)]

    def takes(before: Sequence[str], behind: Sequence[str]) -> bool | None:
        """None: neither as parts nor as one string."""
        said, answered = ([{"role": one, "content": form(_BESIDE)} for one in roles] for roles in (before, behind))

        def told(given: Any) -> str | None:
            messages = [*said, {"role": role, "content": given}, *answered]
            return _written(tokenizer, template, messages, tools=[_ANY_TOOL] if with_tools else None)

        text = told(content)
        if text is None:
            return None if told(form(joined(content, image))) is None else False
        if _LIST.search(text) or (with_image and not (image and image in text)):
            return False
        return -1 < text.find(_ANY_WORDS) < text.find(_OTHER_WORDS)

    found = {takes(*around) for around in _AROUND.get(role, _BEHIND_OTHERS)}
    return True in found and False not in found


@lru_cache(maxsize=8)
def image_form(tokenizer: "PreTrainedTokenizerBase", template: str) -> ImageForm:
    """Finds what a chat template writes for an image, whatever stands around it, and where."""
    first, second = _ANY_WORDS, _OTHER_WORDS

    def asked(*parts: Part) -> str:
        return _written(tokenizer, template, [{"role": "user", "content": list(parts)}]) or ""

    opening, words, _ = asked(text_part(first)).partition(first)
    shown = asked(IMAGE, text_part(first)).partition(first)[0]
    # SmolVLM's opens with a space where words come first.
    num_common = next((at for at, letter in enumerate(opening) if not shown.startswith(letter, at)), len(opening))
    text = shown[num_common:]
    among = asked(text_part(first), IMAGE, text_part(second))
    if not words or not text or _LIST.search(among):
        return ImageForm("", "elsewhere")
    before, place, behind = (among.find(one) for one in (first, text, second))
    if -1 < before < place < behind:
        return ImageForm(text, "in place")
    return ImageForm(text, "in front" if -1 < place < before < behind else "elsewhere")


def _one_part(words: str) -> list[Part]:
    return [text_part(words)]


def _written(
    tokenizer: "PreTrainedTokenizerBase",
    template: str,
    messages: list[Message],
    *,
    tools: list[ToolSchema] | None = None,
) -> str | None:
    """Returns what a template writes for messages and the beginning of an answer; None if it refuses them."""
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        )
    except Exception:  # what a template does with values of the messages may raise anything
        return None
