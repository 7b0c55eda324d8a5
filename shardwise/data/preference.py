"""Turns data files into what preference and reward-model training consume: pairs of answers, or labelled answers."""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardwise.config import DataError, PreferenceDataConfig
from shardwise.data.chat import render_conversation, render_response_sample
from shardwise.data.messages import Message, checked_messages, prompt_messages, with_system_prompt
from shardwise.data.row_processes import map_rows, nothing
from shardwise.data.rows import (
    Loaded,
    Rendered,
    fit,
    get_prompt,
    kept,
    loaded_sequences,
    make_sample,
    reading,
    take_images,
    tool_schemas,
    unshown_ids,
)
from shardwise.data.sources import (
    Row,
    describe_type,
    get_cell,
    get_column,
    get_text,
    plain_cell,
    preview,
    read_rows,
)
from shardwise.data.vision import Vision, continued_positions
from shardwise.types import ImageRef, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def preference_pairs(
    config: PreferenceDataConfig,
    files: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_rows: int | None,
    vision: Vision | None = None,
    media_token_ids: Collection[int] = (),
    on_row: Callable[[], object] = nothing,
) -> Loaded[Sample]:
    """Reads rows with a chosen and a rejected answer to the same messages.

    The messages that both conversations begin with are context; from where they part, the assistant's turns are
    trained: the last turn alone, if they differ in nothing else. A pair is over `config.max_sequence_tokens` if one
    side is; truncate cuts both sides there. Pairs whose sides are the same, or become the same when cut, teach nothing
    and are dropped. Images stand in the context, and both sides show them.

    Args:
        vision, media_token_ids, on_row: as in `supervised_samples`.
    Returns:
        Samples in the order chosen, rejected, chosen, rejected, ...: two neighbours are a pair, which
        `pack(..., keep_together=2)` keeps together. `reward` is the pair's margin on the chosen side (0 without a
        margin column) and 0 on the other, `group` the number of the pair. The counts are of rows; num_identical of the
        num_dropped had the same answer twice.
    Raises:
        DataError: a file or row that cannot be used, or no rows left; names file, row and column.
    """
    rows = read_rows(files, max_rows=max_rows)
    read = partial(_pair, config, tokenizer, vision, media_token_ids)
    pairs = list(map_rows(read, rows, num_workers=config.preprocessing_num_workers, on_row=on_row))
    left = [pair for pair in pairs if pair.sides]
    samples = [replace(side, group=group) for group, pair in enumerate(left) for side in pair.sides]
    num_identical = sum(pair.is_identical for pair in pairs)
    if not samples and num_identical:
        raise DataError(
            f'0 of {len(rows)} rows left: in {num_identical} of them "{config.chosen_column}" and '
            f'"{config.rejected_column}" are the same up to data.max_sequence_tokens={config.max_sequence_tokens}; '
            "set data.chosen_column and data.rejected_column to columns that differ, or raise the limit"
        )
    counts = {
        "num_rows": len(rows),
        "num_dropped": len(rows) - len(left),
        "num_truncated": sum(pair.is_truncated for pair in left),
        "num_identical": num_identical,
    }
    return loaded_sequences(config, files, samples, counts)


def labelled_samples(
    config: PreferenceDataConfig,
    files: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_rows: int | None,
    vision: Vision | None = None,
    media_token_ids: Collection[int] = (),
    on_row: Callable[[], object] = nothing,
) -> Loaded[Sample]:
    """Reads rows with one answer and whether it is desirable, for KTO.

    Only the assistant's last turn of a conversation is trained. `config.on_overlong` decides on a sequence over
    `config.max_sequence_tokens`: truncate cuts off its end, and drops it where nothing to train is left.

    Args:
        vision, media_token_ids, on_row: as in `supervised_samples`. Images stand before the answer.
    Returns:
        Samples whose `reward` is +1 (desirable) or -1; the count num_desirable says how many have +1.
    Raises:
        DataError: a file or row that cannot be used, or no rows left; names file, row and column.
    """
    rows = read_rows(files, max_rows=max_rows)
    read = partial(_labelled_sample, config, tokenizer, vision, media_token_ids)
    outcomes = list(map_rows(read, rows, num_workers=config.preprocessing_num_workers, on_row=on_row))
    found, counts = kept(outcomes)
    samples = [replace(sample, group=group) for group, sample in enumerate(found)]
    return loaded_sequences(
        config, files, samples, counts | {"num_desirable": sum(sample.reward > 0 for sample in samples)}
    )


def check_pair_row(config: PreferenceDataConfig, row: Row) -> None:
    """Checks, without a tokenizer, that the row has what `preference_pairs` renders. Raises DataError: it has not."""
    _margin(config, row)
    for column in (config.chosen_column, config.rejected_column):
        _check_answer(config, row, column)


def check_labelled_row(config: PreferenceDataConfig, row: Row) -> None:
    """Checks, without a tokenizer, that the row has what `labelled_samples` renders. Raises DataError: it has not."""
    _label(config, row)
    _check_answer(config, row, config.response_column)


def mismatched(samples: Sequence[Sample], *, max_tokens: int) -> list[Sample]:
    """Joins each prompt with the answer to another, from which KTO estimates the policy's distance to the reference.

    The answer comes from the next sample (after the last comes the first) that has a different prompt, or simply from
    the next one where all prompts are the same.

    Args:
        samples: those of one batch, at least two. A prompt ends where the first trained token begins, and has all
            images.
        max_tokens: longer sequences are cut at their end.
    Returns:
        As many samples, in the same order and with the same groups; reward 0, which no labelled answer has.
    Source: Ethayarajh et al. 2024, section 4. Differs: there it is always the next sample, even one with the same
    prompt.
    """
    assert len(samples) > 1, "one sample has no other whose answer it could take"
    starts = [int(sample.loss_mask.int().argmax()) for sample in samples]
    prompts = [_prompt(sample, start) for sample, start in zip(samples, starts, strict=True)]
    mixed = []
    for index, (sample, other) in enumerate(zip(samples, _next_others(prompts), strict=True)):
        answer = slice(starts[other], None)
        token_ids = torch.cat([sample.token_ids[: starts[index]], samples[other].token_ids[answer]])[:max_tokens]
        loss_mask = torch.cat([sample.loss_mask[: starts[index]], samples[other].loss_mask[answer]])[:max_tokens]
        positions = None if sample.position_ids is None else sample.position_ids[:, : starts[index]]
        mixed.append(
            Sample(
                uid=f"{sample.uid} with the answer of {samples[other].uid}",
                token_ids=token_ids,
                loss_mask=loss_mask,
                position_ids=continued_positions(positions, len(token_ids)),
                image_refs=sample.image_refs,
                group=sample.group,
            )
        )
    return mixed


def _next_others(values: Sequence[object]) -> list[int]:
    """Returns for every value the index of the next one, around the end, that is another; of the next where all are the
    same."""
    size = len(values)
    found: list[int | None] = [None] * size
    for index in reversed(range(2 * size)):  # twice around: the first time the last ones do not know the first yet
        place, following = index % size, (index + 1) % size
        found[place] = following if values[place] != values[following] else found[following]
    return [(index + 1) % size if other is None else other for index, other in enumerate(found)]


def _prompt(sample: Sample, num_tokens: int) -> tuple[list[int], list[str | bytes | None]]:
    """Returns what tells a sample's prompt from others: its tokens, and its images."""
    images = [image.path if image.data is None else image.data.numpy().tobytes() for image in sample.image_refs]
    return sample.token_ids[:num_tokens].tolist(), images


@dataclass(frozen=True, slots=True)
class _Pair:
    """What a row with two answers became."""

    sides: list[Sample]
    """Chosen and rejected; empty if the row is dropped."""
    is_truncated: bool = False
    is_identical: bool = False
    """Whether it is dropped because its sides are the same."""


def _pair(
    config: PreferenceDataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    vision: Vision | None,
    media_token_ids: Collection[int],
    row: Row,
) -> _Pair:
    margin = _margin(config, row)
    rendered, image_refs = _render_pair(config, row, tokenizer, vision, media_token_ids)
    fitted = fit(config, row, rendered, image_refs) if rendered else []
    if fitted is None:
        return _Pair([])
    if not fitted or fitted[0] == fitted[1]:
        return _Pair([], is_identical=True)
    sides = [
        make_sample(f"{row.origin} {column}", *side, image_refs=image_refs, vision=vision, reward=reward)
        for column, side, reward in zip(
            (config.chosen_column, config.rejected_column), fitted, (margin, 0.0), strict=True
        )
    ]
    return _Pair(sides, is_truncated=fitted != rendered)


def _labelled_sample(
    config: PreferenceDataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    vision: Vision | None,
    media_token_ids: Collection[int],
    row: Row,
) -> tuple[Sample, bool] | None:
    """Returns the sample of a row and whether it was cut; None if the row is dropped."""
    reward = 1.0 if _label(config, row) else -1.0
    rendered, image_refs = _render_answer(config, row, tokenizer, vision, media_token_ids)
    fitted = fit(config, row, rendered, image_refs)
    if fitted is None:
        return None
    return make_sample(row.origin, *fitted[0], image_refs=image_refs, vision=vision, reward=reward), fitted != rendered


def _render_pair(
    config: PreferenceDataConfig,
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    vision: Vision | None,
    media_token_ids: Collection[int],
) -> tuple[list[Rendered], list[ImageRef]]:
    """Renders the chosen and the rejected side, in this order, and returns them with the images of both; without sides
    where they are the same conversation."""
    columns = (config.chosen_column, config.rejected_column)
    if not config.apply_chat_template:
        return [_render_plain(config, row, column, tokenizer, media_token_ids) for column in columns], []
    chosen, rejected = (_conversation(config, row, column) for column in columns)
    if chosen == rejected:
        return [], []
    start = _parting(config, row, chosen, rejected)
    answers = [chosen[start:], rejected[start:]]
    return _render_answers(config, row, chosen[:start], answers, tokenizer, vision, media_token_ids)


def _render_answer(
    config: PreferenceDataConfig,
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    vision: Vision | None,
    media_token_ids: Collection[int],
) -> tuple[list[Rendered], list[ImageRef]]:
    """Renders the answer, as a list of one, and returns it with its images."""
    column = config.response_column
    if not config.apply_chat_template:
        return [_render_plain(config, row, column, tokenizer, media_token_ids)], []
    messages = _conversation(config, row, column)
    last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    return _render_answers(config, row, messages[:last], [messages[last:]], tokenizer, vision, media_token_ids)


def _render_answers(
    config: PreferenceDataConfig,
    row: Row,
    context: list[Message],
    answers: Sequence[list[Message]],
    tokenizer: "PreTrainedTokenizerBase",
    vision: Vision | None,
    media_token_ids: Collection[int],
) -> tuple[list[Rendered], list[ImageRef]]:
    """Renders the context with each of the answers, and returns these sequences with the images of the context, which
    are taken once."""
    messages = [*context, *(message for answer in answers for message in answer)]
    words, image_refs = take_images(config, row, messages, vision, num_context=len(context))
    shared, others = with_system_prompt(words[: len(context)], config.system_prompt), words[len(context) :]
    tools, unshown = tool_schemas(config, row), unshown_ids(media_token_ids, vision)
    sides = []
    for answer in answers:
        side, others = [*shared, *others[: len(answer)]], others[len(answer) :]
        rendered = render_conversation(
            tokenizer,
            side,
            row.origin,
            trained_from=len(shared),
            tools=tools,
            media_token_ids=unshown,
            as_read=reading(vision),
        )
        sides.append(rendered if vision is None else vision.expand(*rendered, image_refs, row.origin))
    return sides, image_refs


def _render_plain(
    config: PreferenceDataConfig,
    row: Row,
    column: str,
    tokenizer: "PreTrainedTokenizerBase",
    media_token_ids: Collection[int],
) -> Rendered:
    take_images(config, row, None, vision=None)  # refuses them: only the chat template has places for images
    prompt, answer = _plain_parts(config, row, column)
    return render_response_sample(
        tokenizer,
        prompt,
        answer,
        apply_chat_template=False,
        system_prompt=None,
        origin=row.origin,
        media_token_ids=media_token_ids,
    )


def _check_answer(config: PreferenceDataConfig, row: Row, column: str) -> None:
    if config.apply_chat_template:
        _conversation(config, row, column)
    else:
        _plain_parts(config, row, column)


def _plain_parts(config: PreferenceDataConfig, row: Row, column: str) -> tuple[str | list[Message], str]:
    """Returns the prompt and the answer in `column`, without a chat template."""
    if isinstance(cell := get_column(row, column, config), list):
        raise DataError(
            f'{row.origin}: column "{column}" is a list, and data.apply_chat_template=false takes strings: '
            f"{preview(cell)}; set data.apply_chat_template=true"
        )
    return get_prompt(config, row), get_text(row, column, config)


def _conversation(config: PreferenceDataConfig, row: Row, column: str) -> list[Message]:
    """Returns the messages that the answer in `column` answers, without a system prompt of the config's, followed by
    this answer. A content may be a list of parts, with images as the row has them."""
    cell = _cell(config, row, column)
    if not isinstance(cell, str | list):
        raise DataError(
            f'{row.origin}: column "{column}" is {describe_type(cell)}, expected a string or a list of messages: '
            f"{preview(cell)}"
        )
    answer = [{"role": "assistant", "content": cell}] if isinstance(cell, str) else cell
    messages = checked_messages(answer, f'{row.origin}: column "{column}"', may_have_parts=True)
    if messages[0]["role"] != "assistant":
        return messages
    given = _cell(config, row, config.prompt_column)
    prompt = given if isinstance(given, list) else get_prompt(config, row)
    return [*prompt_messages(prompt, None, row.origin, may_have_parts=True), *messages]


def _cell(config: PreferenceDataConfig, row: Row, column: str) -> Any:
    """Returns the cell of a column as plain JSON values, but contents that are lists, in which images may be bytes, as
    they are."""
    cell = get_cell(row, column)
    if not isinstance(cell, list):
        return get_column(row, column, config)
    return [_message(row, column, one) if isinstance(one, dict) else plain_cell(row, column, one) for one in cell]


def _message(row: Row, column: str, message: Message) -> Message:
    return {
        key: value if key == "content" and isinstance(value, list) else plain_cell(row, column, value)
        for key, value in message.items()
    }


def _parting(config: PreferenceDataConfig, row: Row, chosen: list[Message], rejected: list[Message]) -> int:
    """Returns how many messages both sides begin with. Raises DataError: they do not answer the same messages."""
    num_shared = 0
    while chosen[num_shared : num_shared + 1] == rejected[num_shared : num_shared + 1]:
        num_shared += 1
    parts = [side[num_shared] if num_shared < len(side) else None for side in (chosen, rejected)]
    if any(part is None or part["role"] != "assistant" for part in parts):
        shown = " and ".join("nothing" if part is None else preview(part) for part in parts)
        raise DataError(
            f'{row.origin}: "{config.chosen_column}" and "{config.rejected_column}" do not answer the same messages: '
            f"after {num_shared} that they share they go on with {shown}, expected an assistant turn in both; "
            "fix the row or remove it"
        )
    return num_shared


def _margin(config: PreferenceDataConfig, row: Row) -> float:
    if config.margin_column is None:
        return 0.0
    cell = get_column(row, config.margin_column, config)
    most = sys.float_info.max  # integers of JSON have no end
    if isinstance(cell, bool) or not isinstance(cell, int | float) or not -most <= cell <= most:
        raise DataError(
            f'{row.origin}: column "{config.margin_column}" is {describe_type(cell)}, expected a finite number: '
            f"{preview(cell)}"
        )
    if cell < 0:
        raise DataError(
            f'{row.origin}: column "{config.margin_column}" is {preview(cell)}: it says how much better the chosen '
            "answer is, so from 0 on; exchange the two answers and drop the sign, or remove the row"
        )
    return float(cell)


def _label(config: PreferenceDataConfig, row: Row) -> bool:
    cell = get_column(row, config.label_column, config)
    if not isinstance(cell, bool):
        raise DataError(
            f'{row.origin}: column "{config.label_column}" is {describe_type(cell)}, expected true (desirable) or '
            f"false: {preview(cell)}"
        )
    return cell
