"""DAPO's soft punishment of overlong completions, in the rewards of samples."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from shardwise.algorithms import overlong_penalty
from shardwise.config import AlgorithmConfig
from shardwise.types import Sample


def with_overlong_penalty(samples: Sequence[Sample], config: AlgorithmConfig, *, max_tokens: int) -> list[Sample]:
    """Applies DAPO's soft punishment to the rewards of completions that come close to `max_tokens`. The length includes
    what the environment said between the turns."""
    if config.overlong_penalty is None:
        return list(samples)
    lengths = torch.tensor([_num_response_tokens(sample) for sample in samples])
    penalties = overlong_penalty(
        lengths,
        max_tokens=max_tokens,
        buffer_tokens=config.overlong_penalty.buffer_tokens,
        factor=config.overlong_penalty.factor,
    )
    return [replace(s, reward=s.reward + p) for s, p in zip(samples, penalties.tolist(), strict=True)]


def _num_response_tokens(sample: Sample) -> int:
    """Counts the tokens from the first trained one on."""
    return int(sample.loss_mask.cumsum(0).bool().sum())
