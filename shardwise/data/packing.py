"""Packs samples into token batches: the same number on every data-parallel rank, none over the token cap.

Shape letters: L tokens of one sample, T tokens of one batch, S sequences of one batch.
"""

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.config import DataError
from shardwise.types import PER_TOKEN_FIELDS, Denominators, Images, Sample, TokenBatch


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The samples of one optimizer step, packed.

    Example: samples of 3, 2 and 2 tokens on two ranks with at most 4 tokens a batch:
        shards[0][0].sample_index == [0] and shards[1][0].sample_index == [1, 2]
    """

    shards: list[list[TokenBatch]]
    """The micro-batches of each data-parallel rank; every rank has the same number, at least one."""
    denominators: Denominators
    """Counted over all shards."""


def pack(samples: Sequence[Sample], *, num_shards: int, max_tokens: int, keep_together: int = 1) -> PackedStep:
    """Splits samples over ranks and micro-batches.

    Makes as few batches as best-fit-decreasing finds, rounded up to a multiple of `num_shards`, and evens out their
    token counts. Ranks run their k-th batches in lockstep, so batches of similar size get the same k. Deterministic.

    Args:
        samples: have at least one token each; either all or none have a given optional per-token field.
        num_shards: the number of data-parallel ranks.
        max_tokens: the hard cap on the tokens of one batch. A sequence is never split.
        keep_together: how many consecutive samples share a batch, one after the other: 2 for pairs to compare.
    Raises:
        DataError: a sample, or samples to keep together, are longer than the cap; names them and both numbers.
    """
    assert len(samples) % keep_together == 0, (len(samples), keep_together)
    units = [samples[start : start + keep_together] for start in range(0, len(samples), keep_together)]
    lengths = [sum(len(sample.token_ids) for sample in unit) for unit in units]
    for unit, length in zip(units, lengths, strict=True):
        assert all(len(sample.token_ids) > 0 for sample in unit), f"{unit[0].uid}: a sample without tokens"
        if length > max_tokens:
            raise DataError(_too_long(unit, length, max_tokens))
    bins = _best_fit_decreasing(lengths, max_tokens)
    num_bins = max(1, -(-len(bins) // num_shards)) * num_shards
    padded = bins + [[] for _ in range(num_bins - len(bins))]
    levelled = _longest_first(lengths, num_bins, max_tokens) or padded
    shards = _deal(levelled, lengths, num_shards)
    present = _present_fields(samples)
    members = range(keep_together)
    return PackedStep(
        shards=[
            [_batch(samples, [unit * keep_together + k for unit in bin for k in members], present) for bin in shard]
            for shard in shards
        ],
        denominators=Denominators(
            num_tokens=sum(int(sample.loss_mask.sum()) for sample in samples),
            num_sequences=sum(bool(sample.loss_mask.any()) for sample in samples),
        ),
    )


def unpack(step: PackedStep, values: list[list[Tensor]]) -> list[Tensor]:
    """Undoes the packing for values that were computed per token.

    Args:
        values: a tensor [T] for each micro-batch of each shard of `step`.
    Returns:
        one tensor [L] per sample, in the order of the samples that were packed.
    """
    found: dict[int, Tensor] = {}
    for shard, shard_values in zip(step.shards, values, strict=True):
        for batch, value in zip(shard, shard_values, strict=True):
            assert value.shape == batch.input_ids.shape, (value.shape, batch.input_ids.shape)
            starts = batch.cu_seqlens.tolist()
            for place, index in enumerate(batch.sample_index):
                found[index] = value[starts[place] : starts[place + 1]]
    return [found[index] for index in range(len(found))]


def _too_long(unit: Sequence[Sample], length: int, max_tokens: int) -> str:
    what, rule = f"sample {unit[0].uid} has", "a sequence is never split over micro-batches"
    if len(unit) > 1:
        what, rule = f"the {len(unit)} samples of {unit[0].uid} have", "what is compared stays in one micro-batch"
    return (
        f"{what} {length} tokens, more than engine.max_tokens_per_micro_batch={max_tokens}, and {rule}; "
        "raise the cap or shorten them"
    )


def _by_length(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _best_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Puts each sample, the longest first, into the fullest bin with room for it, or else into a new one."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for index in _by_length(lengths):
        place = bisect.bisect_left(rooms, (lengths[index], 0))
        if place < len(rooms):
            room, bin = rooms.pop(place)
            bins[bin].append(index)
        else:
            room, bin = max_tokens, len(bins)
            bins.append([index])
        bisect.insort(rooms, (room - lengths[index], bin))
    return bins


def _longest_first(lengths: Sequence[int], num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """Puts each sample, the longest first, into the emptiest of `num_bins` bins; None if one does not fit there."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, bin) for bin in range(num_bins)]  # a heap
    for index in _by_length(lengths):
        load, bin = loads[0]
        if load + lengths[index] > max_tokens:
            return None
        bins[bin].append(index)
        heapq.heapreplace(loads, (load + lengths[index], bin))
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], num_shards: int) -> list[list[list[int]]]:
    """Deals the bins out to ranks, the fullest first, back and forth so that the ranks' totals stay close."""
    shards: list[list[list[int]]] = [[] for _ in range(num_shards)]
    fullest_first = sorted(bins, key=lambda bin: (-sum(lengths[index] for index in bin), bin))
    for start in range(0, len(bins), num_shards):
        row = fullest_first[start : start + num_shards]
        forth = start // num_shards % 2 == 0
        for shard, bin in zip(shards, row if forth else reversed(row), strict=True):
            shard.append(bin)
    return shards


def _batch(samples: Sequence[Sample], indices: list[int], present: list[str]) -> TokenBatch:
    if not indices:
        return _empty_batch(samples, present)
    chosen = [samples[index] for index in indices]
    lengths = torch.tensor([len(sample.token_ids) for sample in chosen])
    per_token: dict[str, Any] = {name: torch.cat([getattr(sample, name) for sample in chosen]) for name in present}
    shown = [sample.images for sample in chosen if sample.images is not None]
    return TokenBatch(
        input_ids=torch.cat([sample.token_ids for sample in chosen]),
        position_ids=_positions(chosen),
        cu_seqlens=torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32),
        loss_mask=torch.cat([sample.loss_mask for sample in chosen]),
        sample_index=list(indices),
        uids=[sample.uid for sample in chosen],
        images=Images.joined(shown) if shown else None,
        image_refs=[image_ref for sample in chosen for image_ref in sample.image_refs],
        rewards=torch.tensor([sample.reward for sample in chosen]),
        **per_token,
    )


def _positions(samples: Sequence[Sample]) -> Tensor:
    """Returns the position ids: [T], or [3, T] where a sample has positions of its own."""
    counted = [torch.arange(len(sample.token_ids)) for sample in samples]
    if all(sample.position_ids is None for sample in samples):
        return torch.cat(counted)
    own = [
        count.expand(3, -1) if sample.position_ids is None else sample.position_ids
        for sample, count in zip(samples, counted, strict=True)
    ]
    return torch.cat(own, dim=1)


def _empty_batch(samples: Sequence[Sample], present: list[str]) -> TokenBatch:
    """Builds a batch of one masked token, so that a rank without samples still runs every collective of a step. Its
    experts are -1: the routers choose them."""
    per_token: dict[str, Any] = {
        name: torch.full_like(getattr(samples[0], name)[:1], -1 if name == "experts" else 0) for name in present
    }
    return TokenBatch(
        input_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        sample_index=[],
        uids=[],
        rewards=torch.zeros(1),
        **per_token,
    )


def _present_fields(samples: Sequence[Sample]) -> list[str]:
    present = []
    for name in PER_TOKEN_FIELDS:
        num_with = sum(getattr(sample, name) is not None for sample in samples)
        assert num_with in (0, len(samples)), f"{num_with} of {len(samples)} samples have {name}; all or none must"
        if num_with:
            present.append(name)
    return present
