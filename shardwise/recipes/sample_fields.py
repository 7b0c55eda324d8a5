"""Fields of the samples of a step: read as one padded tensor, and set."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.types import Sample


def present(values: Tensor | None) -> Tensor:
    """Returns values that an earlier phase of the step must have set."""
    assert values is not None
    return values


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Returns [N, L], with 0 or False after the end of a row."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def padded_field(samples: Sequence[Sample], name: str) -> Tensor:
    """Returns a field of all samples, which an earlier phase of the step must have set, as `padded` does."""
    return padded([present(getattr(sample, name)) for sample in samples])


def with_field(samples: Sequence[Sample], name: str, rows: Iterable[Tensor]) -> list[Sample]:
    """Sets a field of every sample to the numbers of its tokens, behind which a row may be padded."""
    named: list[Any] = list(zip(samples, rows, strict=True))
    return [replace(sample, **{name: row[: len(sample.token_ids)]}) for sample, row in named]
