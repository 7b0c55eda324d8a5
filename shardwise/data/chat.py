"""Text to tokens: prompts, responses and conversations, through the tokenizer's chat template where one is wanted."""

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from shardwise.config import DataError
from shardwise.data.messages import (
    Message,
    ToolSchema,
    checked_messages,
    prompt_messages,
    require_content,
    with_system_prompt,
)
from shardwise.data.sources import describe_type, preview
from shardwise.data.template_forms import formed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANY_PROMPT, _ANY_TURN = "prompt", "<[any turn]>"
"""Stand-ins for a prompt and a turn: what a template writes after a turn does not depend on what the turn says."""
_BEFORE, _SPACE = "\n", "\N{LOWER ONE EIGHTH BLOCK}"
"""Text that no word continues, and SentencePiece's own character for a space."""


def render_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | list[Message],
    *,
    apply_chat_template: bool,
    system_prompt: str | None,
    origin: str,
    tools: Sequence[ToolSchema] = (),
    media_token_ids: Collection[int] = (),
    as_read: Callable[[str], str] = str,
) -> list[int]:
    """Renders a prompt as token ids [L], ready to be followed by a response.

    Args:
        prompt: text (one user message for the chat template), or messages, whose contents may be parts as
            `take_images` returns them.
        apply_chat_template: False tokenizes the text as it is, after the special tokens that the tokenizer puts first.
        system_prompt: put before messages that have no system message; only with a chat template.
        origin: names the row in errors.
        tools: the tools that the chat template offers to the model.
        media_token_ids: tokens that stand for parts of images and videos, which the text must not spell.
        as_read: makes of a rendered text what is tokenized of it; see `Vision.as_read`.
    Raises:
        DataError: an empty prompt, bad messages, no chat template, or a text that spells one of `media_token_ids`.
    """
    if apply_chat_template:
        messages = prompt_messages(prompt, system_prompt, origin, may_have_parts=True)
        text = _render(tokenizer, messages, origin, add_generation_prompt=True, tools=tools, as_read=as_read)
        token_ids = _encode(tokenizer, text)
    else:
        token_ids = _encode_opening(tokenizer, _plain_prompt(prompt, origin))
    return _at_least_one(_only_words(tokenizer, token_ids, media_token_ids, origin), origin)


def render_response_sample(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | list[Message],
    response: str,
    *,
    apply_chat_template: bool,
    system_prompt: str | None,
    origin: str,
    tools: Sequence[ToolSchema] = (),
    media_token_ids: Collection[int] = (),
    as_read: Callable[[str], str] = str,
) -> tuple[list[int], list[bool]]:
    """Renders a prompt, which is not trained, and the response to it, which is, with its end-of-sequence token.

    Args: as in `render_prompt`.
    Returns:
        token ids [L] and loss mask [L].
    """
    if apply_chat_template:
        messages = prompt_messages(prompt, system_prompt, origin, may_have_parts=True)
        answer = {"role": "assistant", "content": response}
        return render_conversation(
            tokenizer,
            [*messages, answer],
            origin,
            trained_from=len(messages),
            tools=tools,
            media_token_ids=media_token_ids,
            as_read=as_read,
        )
    prompt_ids = render_prompt(tokenizer, prompt, apply_chat_template=False, system_prompt=system_prompt, origin=origin)
    response_ids = [*_encode_inside(tokenizer, response), tokenizer.eos_token_id]
    token_ids = _only_words(tokenizer, prompt_ids + response_ids, media_token_ids, origin)
    return token_ids, [False] * len(prompt_ids) + [True] * len(response_ids)


def render_conversation(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[Message],
    origin: str,
    *,
    system_prompt: str | None = None,
    trained_from: int = 0,
    tools: Sequence[ToolSchema] = (),
    media_token_ids: Collection[int] = (),
    as_read: Callable[[str], str] = str,
) -> tuple[list[int], list[bool]]:
    """Renders a conversation, with loss on the assistant's turns.

    A trained span begins after the generation prompt, as at inference, and ends with the token that ends the turn (see
    `turn_end_id`). Where the template writes none, that is the special token that the next message begins with; one is
    put behind the last turn. Turns after the last trained one are left out: nothing learns from them.

    Args:
        messages: the first of them is not the assistant's. Contents may be parts as `take_images` returns them. One of
            the assistant's with a weight of 0, as in OpenAI's files for fine-tuning, is context.
        origin: names the row in errors.
        system_prompt: put before messages that have no system message.
        trained_from: index of a message, the system prompt included; assistant turns before it are context.
        tools: the tools that the chat template offers to the model.
        media_token_ids: tokens that stand for parts of images and videos, which the text must not spell.
        as_read: makes of a rendered text what is tokenized of it; see `Vision.as_read`.
    Returns:
        token ids [L] and loss mask [L].
    Raises:
        DataError: bad messages, a text that spells one of `media_token_ids`, no chat template, one that leaves out a
            turn's tool calls, or one that changes the text of earlier turns when later ones follow, so that no mask
            over them would be right.
    """
    messages = with_system_prompt(checked_messages(messages, origin, may_have_parts=True), system_prompt)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= trained_from]
    turns = [i for i in answers if _is_trained(messages[i], origin)]
    if not turns:
        unweighted = " with a weight" if answers else ""
        raise DataError(
            f"{origin}: the conversation has no assistant turn{unweighted}, so there is nothing to learn from it"
        )
    if turns[0] == 0:
        raise DataError(
            f"{origin}: the conversation begins with an assistant turn; begin with a user or system message"
        )
    require_content(messages[: turns[0]], origin)
    text = ""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    end: int | None = None
    is_ended = True
    for turn in turns:
        prompt = _render(tokenizer, messages[:turn], origin, add_generation_prompt=True, tools=tools, as_read=as_read)
        prompt_ids = _at_least_one(_extend(tokenizer, text, token_ids, prompt, origin), origin)
        text = _render(
            tokenizer, messages[: turn + 1], origin, add_generation_prompt=False, tools=tools, as_read=as_read
        )
        if messages[turn].get("tool_calls"):
            _require_calls_written(tokenizer, messages[: turn + 1], text, origin, tools, as_read)
        if not is_ended:
            loss_mask += [token_id in _enders(tokenizer) for token_id in prompt_ids[len(token_ids) :][:1]]
        loss_mask += [False] * (len(prompt_ids) - len(loss_mask))
        token_ids = _extend(tokenizer, prompt, prompt_ids, text, origin)
        said = token_ids[len(prompt_ids) :]
        end = tokenizer.eos_token_id if tokenizer.eos_token_id in said else turn_end_id(tokenizer)
        is_ended = end in said
        num_behind = next((count for count, one in enumerate(reversed(said)) if one == end), 0)
        loss_mask += [True] * (len(said) - num_behind) + [False] * num_behind
    if not is_ended and end is not None:
        token_ids, loss_mask = [*token_ids, end], [*loss_mask, True]
    return _only_words(tokenizer, token_ids, media_token_ids, origin), loss_mask


def _is_trained(turn: Message, origin: str) -> bool:
    weight = turn.get("weight", 1)
    if isinstance(weight, int | float) and weight in (0, 1):
        return bool(weight)
    raise DataError(f"{origin}: an assistant turn has the weight {preview(weight)}; 0 leaves it untrained, 1 trains it")


def render_observation(
    tokenizer: "PreTrainedTokenizerBase",
    observation: str | list[Message],
    *,
    apply_chat_template: bool,
    last_token_id: int,
    origin: str,
    max_chars: int,
    media_token_ids: Collection[int] = (),
) -> list[int] | None:
    """Renders the tokens between a sampled turn and the next: the rest of the turn's end if the policy did not sample
    it, the observation, and the generation prompt of the next turn. Sampled tokens are never tokenized again.

    Args:
        observation: text (one user message for the chat template), or messages.
        last_token_id: the last token that was sampled.
        origin: names the row in errors.
        max_chars: limit on the text's characters, what the template adds included.
        media_token_ids: tokens that stand for parts of images and videos, which an observation must not spell.
    Returns:
        token ids; None where the text is longer than `max_chars`: it is not tokenized.
    Raises:
        DataError: bad messages, messages without a chat template, or a text that spells one of `media_token_ids`.
    """
    if not apply_chat_template:
        if not isinstance(observation, str):
            raise DataError(
                f"{origin}: the observation is {describe_type(observation)}, but data.apply_chat_template=false takes "
                f"strings: {preview(observation)}"
            )
        if len(observation) > max_chars:
            return None
        token_ids = _encode_inside(tokenizer, _characters(observation))
        return _only_words(tokenizer, token_ids, media_token_ids, origin)
    messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    before = [{"role": "user", "content": _ANY_PROMPT}, {"role": "assistant", "content": _ANY_TURN}]
    text = _render(tokenizer, [*before, *checked_messages(messages, origin)], origin, add_generation_prompt=True)
    _, turn, after = text.partition(_ANY_TURN)
    if not turn:
        raise DataError(
            f"{origin}: the chat template does not write what an assistant says as it is, so nothing can follow it; "
            "set model.chat_template=FILE"
        )
    if len(after) > max_chars:
        return None
    token_ids = _only_words(tokenizer, _encode(tokenizer, _characters(after)), media_token_ids, origin)
    if last_token_id not in token_ids:
        return token_ids
    end = token_ids.index(last_token_id)
    ends_the_turn = not tokenizer.decode(token_ids[:end]).strip()
    return token_ids[end + 1 :] if ends_the_turn else token_ids


def turn_end_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Finds the token that ends an assistant's turn. Of what the chat template writes behind what was said it is the
    tokenizer's end-of-sequence token, else the first special one: base models often come with a template that ends
    turns with a token other than the one that ends their texts. A template may write none. Then it is the special token
    that the next message begins with (GLM 4 ends its turns with <|user|>), else the end-of-sequence token.

    Returns:
        None where there is no such token, or no chat template that takes a user's message and an answer.
    """
    if tokenizer.chat_template is None:
        return None
    return _turn_end_id(tokenizer, str(tokenizer.chat_template), tokenizer.eos_token_id, len(tokenizer))


@lru_cache(maxsize=8)
def _turn_end_id(tokenizer: "PreTrainedTokenizerBase", _template: str, _eos_token_id: int, _size: int) -> int | None:
    """Of the tokenizer as it is: with this template, end-of-sequence token and number of tokens."""
    question = {"role": "user", "content": _ANY_PROMPT}
    messages = [question, {"role": "assistant", "content": _ANY_TURN}]

    def behind(following: list[Message]) -> list[int]:
        text = _render(tokenizer, [*messages, *following], "", add_generation_prompt=False)
        return _encode(tokenizer, text.partition(_ANY_TURN)[2])

    try:
        written = behind([])
        if tokenizer.eos_token_id in written:
            return tokenizer.eos_token_id
        enders = _enders(tokenizer)
        return next((one for one in (*written, *behind([question])[:1]) if one in enders), tokenizer.eos_token_id)
    except DataError:
        return None


def _enders(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """The tokens that may end a turn: special ones, but for the one that begins texts."""
    return _special_tokens(tokenizer).keys() - {tokenizer.bos_token_id}


def _special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """Id -> text."""
    return _special_tokens_of(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _special_tokens_of(tokenizer: "PreTrainedTokenizerBase", _size: int) -> dict[int, str]:
    """Asking the tokenizer takes a millisecond where it has hundreds of them, in every turn of every row."""
    return {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}


def _plain_prompt(prompt: str | list[Message], origin: str) -> str:
    if not isinstance(prompt, str):
        raise DataError(
            f"{origin}: the prompt is {describe_type(prompt)}, but data.apply_chat_template=false takes strings: "
            f"{preview(prompt)}; set data.apply_chat_template=true"
        )
    if not prompt.strip():
        raise DataError(f"{origin}: the prompt is empty; fill it in or remove it")
    return prompt


def _render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[Message],
    origin: str,
    *,
    add_generation_prompt: bool,
    tools: Sequence[ToolSchema] = (),
    as_read: Callable[[str], str] = str,
) -> str:
    if tokenizer.chat_template is None:
        raise DataError(
            f"{origin}: the tokenizer has no chat template; set data.apply_chat_template=false to train on plain text, "
            "or model.chat_template=FILE"
        )
    try:
        template = tokenizer.get_chat_template(tools=list(tools) or None)
        text = tokenizer.apply_chat_template(
            [formed(tokenizer, template, message, with_tools=bool(tools)) for message in messages],
            tools=list(tools) or None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            return_dict=False,
        )
    except Exception as error:  # what a template does with values of the messages may raise anything
        raise DataError(
            f"{origin}: the chat template refuses the messages ({error}): {preview(messages)}; "
            "fix the row or set model.chat_template=FILE"
        ) from None
    return as_read(text)


def _require_calls_written(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[Message],
    text: str,
    origin: str,
    tools: Sequence[ToolSchema],
    as_read: Callable[[str], str],
) -> None:
    """Checks that `text`, the rendered messages, shows the tool calls of the last one. Raises DataError if not."""
    silent = {key: value for key, value in messages[-1].items() if key != "tool_calls"}
    without = _render(
        tokenizer, [*messages[:-1], silent], origin, add_generation_prompt=False, tools=tools, as_read=as_read
    )
    if without == text:
        raise DataError(
            f"{origin}: the chat template does not write the tool calls of an assistant turn, so the model would learn "
            f"not to make them: {preview(messages[-1])}; set model.chat_template=FILE to one that does, or write the "
            "calls into content"
        )


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _encode_opening(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Encodes text with the special tokens that the tokenizer puts before it, without those that it puts after it:
    more tokens follow."""
    token_ids, own = tokenizer.encode(text), _encode(tokenizer, text)
    ends = (end for end in range(len(own), len(token_ids) + 1) if token_ids[end - len(own) : end] == own)
    return token_ids[: next(ends, None)]


def _encode_inside(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Encodes text that follows other text: without the space that SentencePiece puts before its first word."""
    token_ids = _encode(tokenizer, text)
    if text.startswith(" ") or not "".join(tokenizer.convert_ids_to_tokens(token_ids[:1])).startswith(_SPACE):
        return token_ids
    before, whole = _encode(tokenizer, _BEFORE), _encode(tokenizer, _BEFORE + text)
    return whole[len(before) :] if whole[: len(before)] == before else token_ids


def _extend(
    tokenizer: "PreTrainedTokenizerBase", before: str, before_ids: list[int], text: str, origin: str
) -> list[int]:
    """Encodes `text`, which begins with the string `before`, such that its tokens begin with `before_ids`."""
    if not text.startswith(before):
        raise DataError(_not_prefix_stable(before, text, origin))
    start, place = _last_border(tokenizer, before, before_ids)
    token_ids, known = _encode(tokenizer, text[start:]), before_ids[place:]
    if token_ids[: len(known)] == known:
        return before_ids[:place] + token_ids
    # A token spans the border. At inference the tokens before the border are already there, so they stay as they are.
    return before_ids + _encode_inside(tokenizer, text[len(before) :])


def _last_border(tokenizer: "PreTrainedTokenizerBase", text: str, token_ids: list[int]) -> tuple[int, int]:
    """Returns (place in `text`, place in `token_ids`) of the last special token, from which on the text has the same
    tokens by itself: what stands before and behind such a token does not depend on each other. Without this, a
    conversation of n turns would be tokenized n times over. (0, 0) where there is no such place."""
    if not token_ids:
        return 0, 0
    special = _special_tokens(tokenizer)
    place = next((at for at in range(len(token_ids) - 1, 0, -1) if token_ids[at] in special), 0)
    start = text.rfind(special[token_ids[place]]) if place else 0
    if start > 0 and _encode(tokenizer, text[start:]) == token_ids[place:]:
        return start, place
    return 0, 0


def _not_prefix_stable(before: str, text: str, origin: str) -> str:
    border = next((i for i, (old, new) in enumerate(zip(before, text, strict=False)) if old != new), len(text))
    start = max(0, border - 20)
    return (
        f"{origin}: the chat template is not prefix-stable: it wrote {before[start : border + 40]!r}, and with the "
        f"next turn that became {text[start : border + 40]!r}, so loss masks over several turns would be wrong; "
        "set model.chat_template=FILE to a template that leaves earlier turns alone, or split the row into single turns"
    )


def _only_words(
    tokenizer: "PreTrainedTokenizerBase", token_ids: list[int], media_token_ids: Collection[int], origin: str
) -> list[int]:
    found = next((token_id for token_id in token_ids if token_id in media_token_ids), None)
    if found is not None:
        raise DataError(
            f"{origin}: the text spells {tokenizer.decode([found])!r}, by which the model knows a part of an image or "
            "a video, and none is shown here; leave it out"
        )
    return token_ids


def _at_least_one(token_ids: list[int], origin: str) -> list[int]:
    if not token_ids:
        raise DataError(f"{origin}: the prompt has no tokens; fill it in or remove it")
    return token_ids


def _characters(text: str) -> str:
    """Returns the text with "?" for every half of a surrogate pair, which is not a character."""
    return text.encode("utf-8", "replace").decode()
