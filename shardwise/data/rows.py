"""Data files to what a run consumes: samples to learn from, or examples to answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from shardwise.config import DataError, EvalDataConfig, HeldOutData, SupervisedDataConfig
from shardwise.data.chat import render_conversation, render_prompt, render_response_sample
from shardwise.data.sources import (
    Row,
    describe_columns,
    describe_type,
    get_column,
    get_text,
    has_column,
    preview,
    read_rows,
)
from shardwise.types import Example, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T", Sample, Example)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """What files gave, in their order, and what was left out."""

    rows: list[T]
    counts: dict[str, int]
    """num_rows read, num_dropped of them left out, num_truncated of those kept cut to the limit."""


def supervised_samples(
    config: SupervisedDataConfig, files: Sequence[str], tokenizer: "PreTrainedTokenizerBase", *, max_rows: int | None
) -> Loaded[Sample]:
    """Reads rows with an answer to learn: conversations, or a prompt and a response.

    A sequence over `config.max_sequence_tokens` follows `config.on_overlong`; truncate cuts its end off, and drops it
    where nothing to train is left.

    Raises:
        DataError: a file or row that cannot be used, or no rows left; names file, row and column.
    """
    rows = read_rows(files, max_rows=max_rows)
    limit = config.max_sequence_tokens
    samples: list[Sample] = []
    num_truncated = 0
    for row in rows:
        token_ids, loss_mask = _tokenize_supervised(config, row, tokenizer)
        overlong = len(token_ids) > limit
        if overlong and config.on_overlong == "error":
            raise DataError(_overlong(row, "sequence", len(token_ids), "data.max_sequence_tokens", limit))
        if (overlong and config.on_overlong == "drop") or not any(loss_mask[:limit]):
            continue
        num_truncated += overlong
        samples.append(
            Sample(
                uid=row.origin,
                token_ids=torch.tensor(token_ids[:limit], dtype=torch.int64),
                loss_mask=torch.tensor(loss_mask[:limit], dtype=torch.bool),
            )
        )
    return _loaded(samples, len(rows), num_truncated, f"data.max_sequence_tokens={limit}", config.on_overlong)


def prompt_examples(
    config: EvalDataConfig, files: Sequence[str], tokenizer: "PreTrainedTokenizerBase", *, max_rows: int | None
) -> Loaded[Example]:
    """Reads rows with a prompt to answer and what judges the answer. Files made for verl work as they are.

    A prompt over `config.max_prompt_tokens` follows `config.on_overlong`; truncate cuts its start off.

    Raises:
        DataError: a file or row that cannot be used, or no rows left; names file, row and column.
    """
    rows = read_rows(files, max_rows=max_rows)
    limit = config.max_prompt_tokens
    examples: list[Example] = []
    num_truncated = 0
    for row in rows:
        prompt_ids = render_prompt(
            tokenizer,
            _get_prompt(config, row),
            apply_chat_template=config.apply_chat_template,
            system_prompt=config.system_prompt,
            origin=row.origin,
        )
        overlong = len(prompt_ids) > limit
        if overlong and config.on_overlong == "error":
            raise DataError(_overlong(row, "prompt", len(prompt_ids), "data.max_prompt_tokens", limit))
        if overlong and config.on_overlong == "drop":
            continue
        num_truncated += overlong
        examples.append(_example(config, row, tokenizer, prompt_ids[-limit:]))
    return _loaded(examples, len(rows), num_truncated, f"data.max_prompt_tokens={limit}", config.on_overlong)


def _tokenize_supervised(
    config: SupervisedDataConfig, row: Row, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[list[int], list[bool]]:
    if has_column(row, config.messages_column):
        if not config.apply_chat_template:
            raise DataError(
                f'{row.origin}: column "{config.messages_column}" is a conversation, which only a chat template turns '
                "into text; set data.apply_chat_template=true, or data.messages_column to a column that is not there"
            )
        messages = get_column(row, config.messages_column)
        return render_conversation(tokenizer, messages, row.origin, system_prompt=config.system_prompt)
    if not (has_column(row, config.prompt_column) or has_column(row, config.response_column)):
        raise DataError(
            f'{row.origin}: neither a conversation in "{config.messages_column}" nor a prompt in '
            f'"{config.prompt_column}" with a response in "{config.response_column}"; the columns are '
            f"{describe_columns(row)}; set data.messages_column, or data.prompt_column and data.response_column"
        )
    return render_response_sample(
        tokenizer,
        _get_prompt(config, row),
        get_text(row, config.response_column),
        apply_chat_template=config.apply_chat_template,
        system_prompt=config.system_prompt,
        origin=row.origin,
    )


def _example(config: EvalDataConfig, row: Row, tokenizer: "PreTrainedTokenizerBase", prompt_ids: list[int]) -> Example:
    ground_truth = get_column(row, config.ground_truth_column)
    if ground_truth is None:
        raise DataError(
            f'{row.origin}: column "{config.ground_truth_column}" is null, so the reward function would have nothing '
            "to compare with; fill it in or set data.ground_truth_column"
        )
    extra_info = get_column(row, "extra_info") if has_column(row, "extra_info") else {}
    if not isinstance(extra_info, dict):
        raise DataError(
            f'{row.origin}: column "extra_info" is {describe_type(extra_info)}, expected an object: '
            f"{preview(extra_info)}"
        )
    has_source = has_column(row, config.data_source_column)
    return Example(
        uid=row.origin,
        prompt_ids=prompt_ids,
        prompt=tokenizer.decode(prompt_ids),
        data_source=get_text(row, config.data_source_column) if has_source else row.stem,
        ground_truth=ground_truth,
        extra_info=extra_info,
    )


def _get_prompt(config: HeldOutData, row: Row) -> str | list[dict[str, Any]]:
    prompt = get_column(row, config.prompt_column)
    if not isinstance(prompt, str | list):
        raise DataError(
            f'{row.origin}: column "{config.prompt_column}" is {describe_type(prompt)}, expected a string or a list of '
            f"messages: {preview(prompt)}"
        )
    return prompt


def _overlong(row: Row, what: str, num_tokens: int, setting: str, limit: int) -> str:
    return (
        f"{row.origin}: the {what} has {num_tokens} tokens, more than {setting}={limit}; "
        "raise it, or set data.on_overlong to drop or truncate"
    )


def _loaded(rows: list[T], num_read: int, num_truncated: int, limit: str, on_overlong: str) -> Loaded[T]:
    if not rows:
        effect = "drops them" if on_overlong == "drop" else "leaves nothing of them to train"
        raise DataError(
            f"0 of {num_read} rows left: all {num_read} are longer than {limit}, and data.on_overlong={on_overlong} "
            f"{effect}; raise the limit"
        )
    counts = {"num_rows": num_read, "num_dropped": num_read - len(rows), "num_truncated": num_truncated}
    return Loaded(rows, counts)
