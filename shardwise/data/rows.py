"""Turns data files into what a run consumes: samples to learn from, or examples to answer."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from shardwise.config import DataError, EvalDataConfig, HeldOutData, SequenceDataConfig, SupervisedDataConfig
from shardwise.console import counted, tell, warn
from shardwise.data.chat import render_conversation, render_prompt, render_response_sample
from shardwise.data.messages import Message, ToolSchema, prompt_messages
from shardwise.data.row_processes import map_rows, nothing
from shardwise.data.sources import (
    Row,
    describe_columns,
    describe_type,
    get_cell,
    get_column,
    get_text,
    has_column,
    plain_cell,
    preview,
    read_rows,
    without_nulls,
)
from shardwise.data.vision import Vision, as_written, in_words, row_images
from shardwise.types import Example, ImageRef, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T", Sample, Example)

_LEFT_OUT = {
    "num_dropped": "dropped",
    "num_identical": "of these with the same answer twice",
    "num_truncated": "truncated",
}
"""Name of a count of rows that were not kept whole -> how the message about it calls them."""
_TOLERATED_SHARE = 0.1
"""Share of the rows that may be dropped without a warning."""

Rendered = tuple[list[int], list[bool]]
"""Token ids [L] and loss mask [L]."""


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """What was read from data files, in their order, and counts of what was left out."""

    rows: list[T]
    counts: dict[str, int]
    """num_rows: rows read; num_dropped: those of them left out; num_truncated: those kept, but cut to the limit."""

    def digest(self) -> str:
        """Returns a hash of the tokens of all rows, and of which are trained."""
        found = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            tensors = [torch.tensor(row.prompt_ids)] if isinstance(row, Example) else [row.token_ids, row.loss_mask]
            for tensor in tensors:
                found.update(len(tensor).to_bytes(8, "little"))
                found.update(tensor.numpy().data)
        return found.hexdigest()


def supervised_samples(
    config: SupervisedDataConfig,
    files: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_rows: int | None,
    vision: Vision | None = None,
    media_token_ids: Collection[int] = (),
    on_row: Callable[[], object] = nothing,
) -> Loaded[Sample]:
    """Reads rows with an answer to learn: conversations, or a prompt and a response.

    `config.on_overlong` decides on a sequence over `config.max_sequence_tokens`: truncate cuts off its end (of a row
    with images all that stands behind the last trained token), and drops the row where nothing to train is left.

    Args:
        vision: shows images to a model that sees them; None refuses rows that have any.
        media_token_ids: tokens that no row may spell, except the one that `vision` writes for images.
        on_row: called for each row when its turn comes: all may take minutes.
    Raises:
        DataError: a file or row that cannot be used, or no rows left; names file, row and column.
    """
    rows = read_rows(files, max_rows=max_rows)
    read = partial(_supervised_sample, config, tokenizer, vision, unshown_ids(media_token_ids, vision))
    outcomes = list(map_rows(read, rows, num_workers=config.preprocessing_num_workers, on_row=on_row))
    samples, counts = kept(outcomes)
    return loaded_sequences(config, files, samples, counts)


def prompt_examples(
    config: EvalDataConfig,
    files: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_rows: int | None,
    tools: Mapping[str, ToolSchema] = MappingProxyType({}),
    vision: Vision | None = None,
    media_token_ids: Collection[int] = (),
    is_judged: bool = True,
    on_row: Callable[[], object] = nothing,
) -> Loaded[Example]:
    """Reads rows with a prompt to answer and a ground truth to judge the answer by. Files made for verl work as is.

    `config.on_overlong` decides on a prompt over `config.max_prompt_tokens`: truncate cuts off its start, and is an
    error where the prompt has images.

    Args:
        vision: shows images to a model that sees them, where that is supported; None refuses rows that have any.
        media_token_ids: tokens that no row may spell, except the one that `vision` writes for images.
        tools: name -> schema of each tool that a row may offer; without any, the column of tools is not read.
        is_judged: whether there is a reward, which needs a ground truth.
        on_row: called for each row when its turn comes.
    Raises:
        DataError: a file or row that cannot be used, or no rows left; names file, row and column.
    """
    rows = read_rows(files, max_rows=max_rows)
    read = partial(
        _prompt_example,
        config,
        tokenizer,
        vision,
        unshown_ids(media_token_ids, vision),
        dict(tools),
        is_judged=is_judged,
    )
    outcomes = list(map_rows(read, rows, num_workers=config.preprocessing_num_workers, on_row=on_row))
    examples, counts = kept(outcomes)
    limit = f"data.max_prompt_tokens={config.max_prompt_tokens}"
    return _loaded(examples, counts, files, limit, config.on_overlong)


def check_supervised_row(config: SupervisedDataConfig, row: Row) -> None:
    """Checks, without a tokenizer, that the row has what `supervised_samples` renders. Raises DataError: it has not."""
    if not _has_conversation(config, row):
        _prompt_and_response(config, row)


def check_prompt_row(config: EvalDataConfig, row: Row, *, is_judged: bool) -> None:
    """Checks, without a tokenizer, that the row has what `prompt_examples` reads. Raises DataError: it has not."""
    get_prompt(config, row)
    if is_judged:
        _ground_truth(config, row)


def fit(
    config: SequenceDataConfig, row: Row, sequences: list[Rendered], image_refs: Sequence[ImageRef] = ()
) -> list[Rendered] | None:
    """Fits the sequences of one row into `config.max_sequence_tokens`: each is cut there, or stays as it is.

    Args:
        image_refs: the images of each sequence, for the error.
    Returns:
        the sequences, or None where the row is dropped: by `config.on_overlong`, or because one of its sequences has
        nothing left to train.
    Raises:
        DataError: a sequence is longer, and `config.on_overlong` is error.
    """
    limit = config.max_sequence_tokens
    longest = max(len(token_ids) for token_ids, _ in sequences)
    if longest > limit and config.on_overlong == "error":
        setting, policies = "data.max_sequence_tokens", "drop or truncate"
        raise DataError(_overlong(row, "sequence", longest, image_refs, setting, limit, policies))
    if longest > limit and config.on_overlong == "drop":
        return None
    cut = [(token_ids[:limit], loss_mask[:limit]) for token_ids, loss_mask in sequences]
    return cut if all(any(loss_mask) for _, loss_mask in cut) else None


def kept(outcomes: Sequence[tuple[T, bool] | None]) -> tuple[list[T], dict[str, int]]:
    """Returns what was kept of rows, and how many there were, as `Loaded.counts` has it.

    Args:
        outcomes: for every row what it became, and whether it was cut; None where it was dropped.
    """
    found = [outcome for outcome in outcomes if outcome is not None]
    counts = {
        "num_rows": len(outcomes),
        "num_dropped": len(outcomes) - len(found),
        "num_truncated": sum(is_truncated for _, is_truncated in found),
    }
    return [row for row, _ in found], counts


def loaded_sequences(
    config: SequenceDataConfig, files: Sequence[str], samples: list[Sample], counts: dict[str, int]
) -> Loaded[Sample]:
    """Wraps the samples that `fit` left of the files' rows; says on standard error how many rows it dropped or cut.

    Raises:
        DataError: nothing is left.
    """
    return _loaded(samples, counts, files, f"data.max_sequence_tokens={config.max_sequence_tokens}", config.on_overlong)


def make_sample(
    uid: str,
    token_ids: list[int],
    loss_mask: list[bool],
    *,
    image_refs: Sequence[ImageRef] = (),
    vision: Vision | None = None,
    reward: float = 0.0,
) -> Sample:
    """Builds a sample from what was rendered: token ids [L] and loss mask [L].

    Args:
        image_refs: the images whose tokens these include, which `vision` places.
    """
    tokens = torch.tensor(token_ids, dtype=torch.int64)
    return Sample(
        uid=uid,
        token_ids=tokens,
        loss_mask=torch.tensor(loss_mask, dtype=torch.bool),
        position_ids=vision.position_ids(tokens, image_refs) if vision is not None and image_refs else None,
        image_refs=list(image_refs),
        reward=reward,
    )


def get_prompt(config: HeldOutData, row: Row) -> str | list[Message]:
    """Returns the prompt of a row: text or messages.

    Raises:
        DataError: no such column, or something else in it; shows the value.
    """
    prompt = get_column(row, config.prompt_column, config)
    if not isinstance(prompt, str | list):
        raise DataError(
            f'{row.origin}: column "{config.prompt_column}" is {describe_type(prompt)}, expected a string or a list of '
            f"messages: {preview(prompt)}"
        )
    return prompt


def unshown_ids(media_token_ids: Collection[int], vision: Vision | None) -> list[int]:
    """Returns the media tokens that no row may spell: all but the image token, if `vision` can write it."""
    return [token_id for token_id in media_token_ids if vision is None or token_id != vision.image_token_id]


def reading(vision: Vision | None) -> Callable[[str], str]:
    """Returns what makes of a rendered text what is tokenized of it; without a vision that is the text itself."""
    return str if vision is None else vision.as_read


def _supervised_sample(
    config: SupervisedDataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    vision: Vision | None,
    unshown: Collection[int],
    row: Row,
) -> tuple[Sample, bool] | None:
    """Returns the sample of a row and whether it was cut; None if the row is dropped."""
    rendered, seen = _tokenize_supervised(config, row, tokenizer, vision, unshown)
    fitted = fit(config, row, [rendered], seen)
    if fitted is None:
        return None
    ((token_ids, loss_mask),) = fitted
    is_truncated = (token_ids, loss_mask) != rendered
    if vision is not None and seen and is_truncated:
        # Nothing is learnt from what stands behind, such as an image that has lost its end.
        length = len(loss_mask) - loss_mask[::-1].index(True)
        token_ids, loss_mask = token_ids[:length], loss_mask[:length]
        seen = vision.within(token_ids, seen)
    return make_sample(row.origin, token_ids, loss_mask, image_refs=seen, vision=vision), is_truncated


def _tokenize_supervised(
    config: SupervisedDataConfig,
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    vision: Vision | None,
    unshown: Collection[int],
) -> tuple[Rendered, list[ImageRef]]:
    """Renders a row as a sequence that includes the tokens of its images; returns it with these images."""
    column = config.messages_column if has_column(row, config.messages_column) else config.prompt_column
    row, image_refs = _with_image_parts(config, row, column, vision)
    rendered = _render_supervised(config, row, tokenizer, unshown, reading(vision))
    if vision is not None:
        rendered = vision.expand(*rendered, image_refs, row.origin)
    return rendered, image_refs


def _with_image_parts(
    config: SupervisedDataConfig | EvalDataConfig, row: Row, column: str, vision: Vision | None
) -> tuple[Row, list[ImageRef]]:
    """Returns the row with what `take_images` makes of its messages in `column`, and the images."""
    cell = get_cell(row, column)
    words, image_refs = take_images(config, row, cell, vision)
    if words is cell:
        return row, image_refs
    return replace(row, values={**row.values, column: plain_cell(row, column, words)}), image_refs


def take_images(
    config: SequenceDataConfig | EvalDataConfig,
    row: Row,
    messages: Any,
    vision: Vision | None,
    *,
    num_context: int | None = None,
) -> tuple[Any, list[ImageRef]]:
    """Returns what `Vision.take` returns for a row's messages; without a vision all their parts are text.

    Raises:
        DataError: as there, or the row has images, and nothing shows them.
    """
    if vision is not None and config.apply_chat_template:
        return vision.take(messages, row, config.images_column, num_context=num_context)
    if row_images(row, config.images_column):
        raise DataError(
            f'{row.origin}: column "{config.images_column}" has images, which supervised, preference and reward-model '
            "training and distillation show to a model, and reinforcement learning with rollout.engine=embedded or "
            "vllm, without an environment; all only through the chat template to a model that has a vision tower and, "
            "in preprocessor_config.json or processor_config.json, its image processor; use one, or set "
            "data.images_column to a column that is not there"
        )

    def refusal(part: Any) -> DataError:
        return DataError(
            f'{row.origin}: a part of a content is {preview(part)}, expected {{"type": "text", "text": ...}}, for this '
            "model is shown no images here; remove it"
        )

    return in_words(messages, refusal) if config.apply_chat_template else messages, []


def _render_supervised(
    config: SupervisedDataConfig,
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    unshown: Collection[int],
    as_read: Callable[[str], str],
) -> Rendered:
    if _has_conversation(config, row):
        return render_conversation(
            tokenizer,
            get_column(row, config.messages_column, config),
            row.origin,
            system_prompt=config.system_prompt,
            tools=tool_schemas(config, row),
            media_token_ids=unshown,
            as_read=as_read,
        )
    return render_response_sample(
        tokenizer,
        *_prompt_and_response(config, row),
        apply_chat_template=config.apply_chat_template,
        system_prompt=config.system_prompt,
        origin=row.origin,
        tools=tool_schemas(config, row) if config.apply_chat_template else (),
        media_token_ids=unshown,
        as_read=as_read,
    )


def _has_conversation(config: SupervisedDataConfig, row: Row) -> bool:
    """Whether the row has a conversation; otherwise it has a prompt and a response."""
    found = has_column(row, config.messages_column)
    if found and not config.apply_chat_template:
        raise DataError(
            f'{row.origin}: column "{config.messages_column}" is a conversation, which only a chat template turns '
            "into text; set data.apply_chat_template=true, or data.messages_column to a column that is not there"
        )
    return found


def _prompt_and_response(config: SupervisedDataConfig, row: Row) -> tuple[str | list[Message], str]:
    if not (has_column(row, config.prompt_column) or has_column(row, config.response_column)):
        raise DataError(
            f'{row.origin}: neither a conversation in "{config.messages_column}" nor a prompt in '
            f'"{config.prompt_column}" with a response in "{config.response_column}"; the columns are '
            f"{describe_columns(row)}; set data.messages_column, or data.prompt_column and data.response_column"
        )
    return get_prompt(config, row), get_text(row, config.response_column, config)


def tool_schemas(config: SequenceDataConfig, row: Row) -> list[ToolSchema]:
    """Returns the schemas of a row's tools. Raises DataError: their column holds something else."""
    cell = _tools_cell(row, config.tools_column)
    if cell is None:
        return []
    unfit = [item for item in cell if not _is_schema(item)] if isinstance(cell, list) else [cell]
    if unfit:
        raise DataError(
            f'{row.origin}: column "{config.tools_column}" has {preview(unfit[0])}, expected a list of JSON schemas of '
            'the form {"type": "function", "function": {"name": ...}}; fix it, or set data.tools_column to a column '
            "that is not there"
        )
    return [without_nulls(schema) for schema in cell]


def _is_schema(item: Any) -> bool:
    return isinstance(item, dict) and _tool_name(item) is not None


def _offered_tools(config: EvalDataConfig, row: Row, tools: Mapping[str, ToolSchema]) -> list[str]:
    """Returns the names of the tools that the row offers, given as names or in schemas; all tools if it gives none."""
    cell = _tools_cell(row, config.tools_column) if tools else None
    if cell is None:
        return list(tools)
    named = [(_tool_name(item), item) for item in cell] if isinstance(cell, list) else [(None, cell)]
    unknown = [item for name, item in named if name not in tools]
    if unknown:
        raise DataError(
            f'{row.origin}: column "{config.tools_column}" has {preview(unknown[0])}, expected a list of names from '
            f"{', '.join(tools)} (rollout.environment.functions), or of schemas with these names"
        )
    return [name for name, _ in named if name is not None]


def _tools_cell(row: Row, column: str) -> Any:
    """Returns the cell of a column of tools, parsed where it is a string of JSON; None where there is none."""
    cell = plain_cell(row, column, get_cell(row, column))
    if not isinstance(cell, str):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell


def _tool_name(item: Any) -> str | None:
    match item:
        case str(name) | {"function": {"name": str(name)}}:
            return name
    return None


def _prompt_example(
    config: EvalDataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    vision: Vision | None,
    unshown: Collection[int],
    tools: Mapping[str, ToolSchema],
    row: Row,
    *,
    is_judged: bool,
) -> tuple[Example, bool] | None:
    """Returns the example of a row and whether its prompt was cut; None if the row is dropped."""
    limit = config.max_prompt_tokens
    offered = _offered_tools(config, row, tools)
    given = get_cell(row, config.prompt_column)
    row, image_refs = _with_image_parts(config, row, config.prompt_column, vision)
    prompt_ids = render_prompt(
        tokenizer,
        get_prompt(config, row),
        apply_chat_template=config.apply_chat_template,
        system_prompt=config.system_prompt,
        origin=row.origin,
        tools=[tools[name] for name in offered],
        media_token_ids=unshown,
        as_read=reading(vision),
    )
    words = prompt_ids
    if vision is not None:
        prompt_ids, _ = vision.expand(prompt_ids, [False] * len(prompt_ids), image_refs, row.origin)
    overlong = len(prompt_ids) > limit
    if overlong and (config.on_overlong == "error" or (image_refs and config.on_overlong == "truncate")):
        policies = "drop (one with images is not truncated)" if image_refs else "drop or truncate"
        raise DataError(
            _overlong(row, "prompt", len(prompt_ids), image_refs, "data.max_prompt_tokens", limit, policies)
        )
    if overlong and config.on_overlong == "drop":
        return None
    example = _example(config, row, tokenizer, prompt_ids, is_judged=is_judged)
    if vision is not None and image_refs:
        assert example.messages is not None, "images without a chat template"
        example = replace(
            example,
            messages=as_written(example.messages, given),
            prompt=tokenizer.decode(words),
            image_refs=image_refs,
            position_ids=vision.position_ids(torch.tensor(prompt_ids), image_refs),
        )
    return replace(example, tools=offered) if tools else example, overlong


def _example(
    config: EvalDataConfig,
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    prompt_ids: list[int],
    *,
    is_judged: bool,
) -> Example:
    """Builds the row's example; of a prompt over the limit it keeps the end."""
    extra_info = plain_cell(row, "extra_info", get_cell(row, "extra_info"))
    if extra_info is None:
        extra_info = {}
    if not isinstance(extra_info, dict):
        raise DataError(
            f'{row.origin}: column "extra_info" is {describe_type(extra_info)}, expected an object: '
            f"{preview(extra_info)}"
        )
    has_source = has_column(row, config.data_source_column)
    given, kept_ids = get_prompt(config, row), prompt_ids[-config.max_prompt_tokens :]
    messages = None
    if config.apply_chat_template:
        messages = prompt_messages(given, config.system_prompt, row.origin, may_have_parts=True)
    # Plain text as it was given: a reward model's tokenizer adds its special tokens to it once more.
    is_whole_text = messages is None and len(kept_ids) == len(prompt_ids)
    return Example(
        uid=row.origin,
        prompt_ids=kept_ids,
        prompt=given if isinstance(given, str) and is_whole_text else tokenizer.decode(kept_ids),
        data_source=get_text(row, config.data_source_column, config) if has_source else row.stem,
        ground_truth=_ground_truth(config, row) if is_judged else None,
        extra_info=extra_info,
        messages=messages,
    )


def _ground_truth(config: EvalDataConfig, row: Row) -> Any:
    ground_truth = get_column(row, config.ground_truth_column, config)
    if ground_truth is None or ground_truth != ground_truth:  # NaN is what pandas makes of null
        raise DataError(
            f'{row.origin}: column "{config.ground_truth_column}" is {preview(ground_truth)}, so the reward function '
            "would have nothing to compare with; fill it in or set data.ground_truth_column"
        )
    return ground_truth


def _overlong(
    row: Row,
    what: str,
    num_tokens: int,
    image_refs: Sequence[ImageRef],
    setting: str,
    limit: int,
    policies: str,
) -> str:
    of_images = sum(image_ref.num_tokens for image_ref in image_refs)
    seen = f", of which {of_images} stand for {counted(len(image_refs), 'image')}" if image_refs else ""
    return (
        f"{row.origin}: the {what} has {num_tokens} tokens{seen}, more than {setting}={limit}; "
        f"raise it, or set data.on_overlong to {policies}"
    )


def _loaded(rows: list[T], counts: dict[str, int], files: Sequence[str], limit: str, on_overlong: str) -> Loaded[T]:
    """Like `loaded_sequences`, for rows of any kind."""
    num_read, num_dropped = counts["num_rows"], counts["num_dropped"]
    if not rows:
        effect = "drops them" if on_overlong == "drop" else "leaves nothing of them to train"
        raise DataError(
            f"0 of {num_read} rows left: all {num_read} are longer than {limit}, and data.on_overlong={on_overlong} "
            f"{effect}; raise the limit"
        )
    if effects := [f"{counts[name]} {effect}" for name, effect in _LEFT_OUT.items() if counts.get(name)]:
        others = f" and {counted(len(files) - 1, 'more file')}" if len(files) > 1 else ""
        say = warn if num_dropped > _TOLERATED_SHARE * num_read else tell
        say(
            f"{files[0]}{others}: {num_read - num_dropped} of {num_read} rows, {', '.join(effects)} ({limit}, "
            f"data.on_overlong={on_overlong})"
        )
    return Loaded(rows, counts)
