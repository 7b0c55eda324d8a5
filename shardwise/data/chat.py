"""Text to tokens: prompts, responses and conversations, through the tokenizer's chat template where one is wanted."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config import DataError, ModelConfig, ModelError
from shardwise.data.sources import describe_type, preview, without_nulls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
"""`{"role": "user", "content": "2+3="}`; further keys go to the chat template as they are."""
ToolSchema = dict[str, Any]
"""A function as chat templates take it: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""


def load_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer that belongs to a model, with `config.chat_template` in place of its own where one is given.

    Raises:
        ModelError: there is no tokenizer, no such template file, or no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    path = config.tokenizer_path or config.path
    is_folder = Path(path).is_dir()
    if not is_folder and path.startswith(("/", ".", "~")):
        raise ModelError(f"tokenizer folder {path} does not exist; set model.path or model.tokenizer_path to one")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=is_folder, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise all kinds here, a bare Exception among them
        _require_readable(Path(path) / "config.json")
        raise ModelError(
            f"no tokenizer can be loaded from {path} ({' '.join(str(error).split())[:300]}); "
            "set model.tokenizer_path to a folder with tokenizer.json and tokenizer_config.json"
        ) from error
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):  # what transformers builds from a config.json alone
        raise ModelError(
            f"the tokenizer in {path} has no vocabulary: its tokenizer.json is missing; add the file or set "
            "model.tokenizer_path"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer in {path} has no end-of-sequence token, so a response would never end; "
            "set eos_token in its tokenizer_config.json"
        )
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    return tokenizer


def _require_readable(config: Path) -> None:
    """Checks config.json, which transformers reads before the tokenizer. Raises ModelError: it exists, but cannot be
    read as a JSON object."""
    try:
        if config.is_file() and not isinstance(json.loads(config.read_text(encoding="utf-8")), dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(f"{config} cannot be read: {error}; download or copy it again") from None


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> None:
    """Checks that the model embeds every token that text, the chat template or the end of a sequence can produce.

    A model with spare rows (a padded vocabulary) is fine, and so is a token that was added for other models: the
    tokenizer of Gemma 3 has one for images, for which its text models have no row. The engine refuses it in data.

    Raises:
        ModelError: such a token's id lies beyond the model's vocabulary; names both numbers.
    """
    template, added = str(tokenizer.chat_template), tokenizer.get_added_vocab()
    named = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    largest = max(
        token_id
        for token, token_id in tokenizer.get_vocab().items()
        if token not in added or token in named or token in template
    )
    if largest >= vocab_size:
        raise ModelError(
            f"the tokenizer has token ids up to {largest}, the model's vocabulary ends at {vocab_size - 1}; "
            "set model.tokenizer_path to the tokenizer that the model was made with"
        )


def render_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | list[Message],
    *,
    apply_chat_template: bool,
    system_prompt: str | None,
    origin: str,
    tools: Sequence[ToolSchema] = (),
    media_token_ids: Collection[int] = (),
) -> list[int]:
    """Renders a prompt as token ids [L], ready to be followed by a response.

    Args:
        prompt: text (one user message for the chat template), or messages.
        apply_chat_template: False tokenizes the text as it is, after the special tokens that the tokenizer puts first.
        system_prompt: put before messages that have no system message; only with a chat template.
        origin: names the row in errors.
        tools: the tools that the chat template offers to the model.
        media_token_ids: tokens that stand for parts of images and videos, which the text must not spell.
    Raises:
        DataError: an empty prompt, bad messages, no chat template, or a text that spells one of `media_token_ids`.
    """
    if apply_chat_template:
        messages = prompt_messages(prompt, system_prompt, origin)
        text = _render(tokenizer, messages, origin, add_generation_prompt=True, tools=tools)
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
) -> tuple[list[int], list[bool]]:
    """Renders a prompt, which is not trained, and the response to it, which is, with its end-of-sequence token.

    Args: as in `render_prompt`.
    Returns:
        token ids [L] and loss mask [L].
    """
    if apply_chat_template:
        messages = prompt_messages(prompt, system_prompt, origin)
        answer = {"role": "assistant", "content": response}
        return render_conversation(
            tokenizer,
            [*messages, answer],
            origin,
            trained_from=len(messages),
            tools=tools,
            media_token_ids=media_token_ids,
        )
    prompt_ids = render_prompt(tokenizer, prompt, apply_chat_template=False, system_prompt=system_prompt, origin=origin)
    response_ids = [*_encode_inside(tokenizer, response), tokenizer.eos_token_id]
    token_ids = _only_words(tokenizer, prompt_ids + response_ids, media_token_ids, origin)
    return token_ids, [False] * len(prompt_ids) + [True] * len(response_ids)


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
    """Finds the token that the chat template ends an assistant's turn with: the tokenizer's end-of-sequence token, else
    the first special one that follows what was said. Base models often come with a template that ends turns with a
    token other than the one that ends their texts.

    Returns:
        None where there is no such token, or no chat template that takes a user's message and an answer.
    """
    if tokenizer.chat_template is None:
        return None
    messages = [{"role": "user", "content": _ANY_PROMPT}, {"role": "assistant", "content": _ANY_TURN}]
    try:
        text = _render(tokenizer, messages, "", add_generation_prompt=False)
    except DataError:
        return None
    token_ids = _encode(tokenizer, text.partition(_ANY_TURN)[2])
    if tokenizer.eos_token_id in token_ids:
        return tokenizer.eos_token_id
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((token_id for token_id in token_ids if token_id in special), None)


def longest_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Returns the most characters that one token can stand for: n tokens spell at most n times as many."""
    return max(map(len, tokenizer.get_vocab()))


def _characters(text: str) -> str:
    """Returns the text with "?" for every half of a surrogate pair, which is not a character."""
    return text.encode("utf-8", "replace").decode()


_ANY_PROMPT, _ANY_TURN = "prompt", "<[any turn]>"
"""Stand-ins for a prompt and a turn: what a template writes after a turn does not depend on what the turn says."""


def render_conversation(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[Message],
    origin: str,
    *,
    system_prompt: str | None = None,
    trained_from: int = 0,
    tools: Sequence[ToolSchema] = (),
    media_token_ids: Collection[int] = (),
) -> tuple[list[int], list[bool]]:
    """Renders a conversation, with loss on the assistant's turns.

    A trained span begins after the generation prompt, as at inference, and ends with the token that ends the turn (see
    `turn_end_id`), or with the turn where the template writes none. Turns after the last trained one are left out:
    nothing learns from them.

    Args:
        messages: the first of them is not the assistant's.
        origin: names the row in errors.
        system_prompt: put before messages that have no system message.
        trained_from: index of a message, the system prompt included; assistant turns before it are context.
        tools: the tools that the chat template offers to the model.
        media_token_ids: tokens that stand for parts of images and videos, which the text must not spell.
    Returns:
        token ids [L] and loss mask [L].
    Raises:
        DataError: bad messages, a text that spells one of `media_token_ids`, no chat template, one that leaves out a
            turn's tool calls, or one that changes the text of earlier turns when later ones follow, so that no mask
            over them would be right.
    """
    messages = with_system_prompt(checked_messages(messages, origin), system_prompt)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= trained_from]
    if not turns:
        raise DataError(f"{origin}: the conversation has no assistant turn, so there is nothing to learn from it")
    if turns[0] == 0:
        raise DataError(
            f"{origin}: the conversation begins with an assistant turn; begin with a user or system message"
        )
    _require_content(messages[: turns[0]], origin)
    text = ""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    for turn in turns:
        prompt = _render(tokenizer, messages[:turn], origin, add_generation_prompt=True, tools=tools)
        prompt_ids = _at_least_one(_extend(tokenizer, text, token_ids, prompt, origin), origin)
        text = _render(tokenizer, messages[: turn + 1], origin, add_generation_prompt=False, tools=tools)
        if messages[turn].get("tool_calls"):
            _require_calls_written(tokenizer, messages[: turn + 1], text, origin, tools)
        token_ids = _extend(tokenizer, prompt, prompt_ids, text, origin)
        loss_mask += [False] * (len(prompt_ids) - len(loss_mask))
        num_trained = _length_to_end(token_ids[len(prompt_ids) :], tokenizer)
        loss_mask += [True] * num_trained + [False] * (len(token_ids) - len(prompt_ids) - num_trained)
    return _only_words(tokenizer, token_ids, media_token_ids, origin), loss_mask


def prompt_messages(prompt: str | list[Message], system_prompt: str | None, origin: str) -> list[Message]:
    """Returns a prompt as messages: text becomes one user message; the system prompt goes first if they have none.

    Raises:
        DataError: an empty prompt, or bad messages.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else checked_messages(prompt, origin)
    _require_content(messages, origin)
    return with_system_prompt(messages, system_prompt)


def with_system_prompt(messages: list[Message], system_prompt: str | None) -> list[Message]:
    """Returns the messages, with the system prompt (if given) put first where they have none of their own."""
    if system_prompt is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def checked_messages(messages: Any, origin: str) -> list[Message]:
    """Returns the messages without null keys and with the arguments of tool calls as objects, as templates take them.

    Raises:
        DataError: not a list of objects with a role and a content that are strings; names the message. Only a message
            with tool calls needs no content, which is then empty.
    """
    if not isinstance(messages, list) or not messages:
        what = "an empty list" if messages == [] else describe_type(messages)
        raise DataError(f"{origin}: the messages are {what}, expected a list of {{role, content}}: {preview(messages)}")
    checked = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise DataError(
                f"{origin}: message {number} is {describe_type(message)}, expected {{role, content}}: "
                f"{preview(message)}"
            )
        if message.get("tool_calls"):
            message = _with_tool_calls(message, f"{origin}: message {number}")
        for key in ("role", "content"):
            if key not in message:
                raise DataError(f'{origin}: message {number} has no "{key}": {preview(message)}')
            if not isinstance(message[key], str):
                raise DataError(
                    f'{origin}: "{key}" of message {number} is {describe_type(message[key])}, expected a string: '
                    f"{preview(message[key])}"
                )
        # Parquet gives every message the keys of all of them, null where it had none; templates test for presence.
        checked.append({key: value for key, value in message.items() if value is not None})
    return checked


def _with_tool_calls(message: Message, place: str) -> Message:
    calls, content = message["tool_calls"], message.get("content")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{place} has tool_calls that are no list of objects: {preview(calls)}")
    calls = [_with_arguments(without_nulls(call), place) for call in calls]
    return {**message, "content": "" if content is None else content, "tool_calls": calls}


def _with_arguments(call: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object; OpenAI's format has them as a string of JSON."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(written := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise DataError(f"{place} calls a tool with arguments that are no JSON object: {preview(written)}; fix the row")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _require_content(messages: list[Message], origin: str) -> None:
    if not any(message["content"].strip() for message in messages):
        raise DataError(f"{origin}: the prompt is empty; fill it in or remove it")


def read_template(path: str) -> str:
    """Returns the text of the file model.chat_template. Raises ModelError: it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"model.chat_template={path} cannot be read ({error}); give a Jinja file, or null for the tokenizer's own"
        ) from None


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
) -> str:
    if tokenizer.chat_template is None:
        raise DataError(
            f"{origin}: the tokenizer has no chat template; set data.apply_chat_template=false to train on plain text, "
            "or model.chat_template=FILE"
        )
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            return_dict=False,
        )
    except Exception as error:  # what a template does with values of the messages may raise anything
        raise DataError(
            f"{origin}: the chat template refuses the messages ({error}): {preview(messages)}; "
            "fix the row or set model.chat_template=FILE"
        ) from None


def render_text(tokenizer: "PreTrainedTokenizerBase", messages: list[Message], origin: str) -> str:
    """Renders messages as text through the chat template, without a generation prompt.

    Raises:
        DataError: no chat template, or one that refuses them.
    """
    return _render(tokenizer, messages, origin, add_generation_prompt=False)


def _require_calls_written(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[Message],
    text: str,
    origin: str,
    tools: Sequence[ToolSchema],
) -> None:
    """Checks that `text`, the rendered messages, shows the tool calls of the last one. Raises DataError if not."""
    silent = {key: value for key, value in messages[-1].items() if key != "tool_calls"}
    if _render(tokenizer, [*messages[:-1], silent], origin, add_generation_prompt=False, tools=tools) == text:
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


_BEFORE, _SPACE = "\n", "\N{LOWER ONE EIGHTH BLOCK}"
"""Text that no word continues, and SentencePiece's own character for a space."""


def _extend(
    tokenizer: "PreTrainedTokenizerBase", before: str, before_ids: list[int], text: str, origin: str
) -> list[int]:
    """Encodes `text`, which begins with the string `before`, such that its tokens begin with `before_ids`."""
    if not text.startswith(before):
        raise DataError(_not_prefix_stable(before, text, origin))
    token_ids = _encode(tokenizer, text)
    if token_ids[: len(before_ids)] == before_ids:
        return token_ids
    # A token spans the border. At inference the tokens before the border are already there, so they stay as they are.
    return before_ids + _encode_inside(tokenizer, text[len(before) :])


def _not_prefix_stable(before: str, text: str, origin: str) -> str:
    border = next((i for i, (old, new) in enumerate(zip(before, text, strict=False)) if old != new), len(text))
    start = max(0, border - 20)
    return (
        f"{origin}: the chat template is not prefix-stable: it wrote {before[start : border + 40]!r}, and with the "
        f"next turn that became {text[start : border + 40]!r}, so loss masks over several turns would be wrong; "
        "set model.chat_template=FILE to a template that leaves earlier turns alone, or split the row into single turns"
    )


def _length_to_end(turn_ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> int:
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in turn_ids else turn_end_id(tokenizer)
    if end is None or end not in turn_ids:
        return len(turn_ids)
    return len(turn_ids) - list(reversed(turn_ids)).index(end)


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
