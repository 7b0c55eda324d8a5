"""Checks that trained tokens are those that were sampled, after the same tokens and at the same positions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from shardwise.checksum import checksum
from shardwise.config import TrainingError
from shardwise.data import PackedStep
from shardwise.types import Completion, GenerateRequest, Metrics, MetricValue, RolloutGroup, Sample, SampledSpan

FATES = ("trained", "masked", "dropped")
"""What may become of a token that was sampled: see docs/rollout.md."""


def with_spans(request: GenerateRequest, completions: Sequence[Completion]) -> list[Completion]:
    """Returns an engine's completions of a request, each with the SampledSpan that proves its tokens."""
    read = request.prompt_ids + request.partial_token_ids
    return [
        replace(completion, spans=[_span_of(read, completion.token_ids)] if completion.token_ids else [])
        for completion in completions
    ]


def num_spanned(completion: Completion) -> int:
    """Counts the tokens of a completion that rollout engines say they have sampled."""
    return sum(span.end - span.start for span in completion.spans)


def require_sampled(samples: Sequence[Sample], packed: PackedStep) -> None:
    """Compares the packed batches of `samples` with what rollout engines sampled.

    Raises:
        TrainingError: a sampled token, or one before it, was altered, cut or shifted since, or a trained token was
            never sampled; names the sample.
    """
    for batch in (batch for shard in packed.shards for batch in shard):
        starts = batch.cu_seqlens.tolist()
        for place, index in enumerate(batch.sample_index):
            own, spans = slice(starts[place], starts[place + 1]), samples[index].spans
            if spans is None:
                continue
            if fault := _fault(batch.input_ids[own], batch.loss_mask[own], spans):
                raise TrainingError(_reported(samples[index].uid, fault))


def token_metrics(groups: Sequence[RolloutGroup], samples: Sequence[Sample]) -> Metrics:
    """Returns how many of the tokens that were sampled for a step are trained, and how many a mask leaves out.

    Args:
        samples: samples of the groups, in their order, as they are trained.
    Raises:
        TrainingError: the number of tokens that count as sampled is not the number that engines have sampled; names
            the sample.
    """
    completions = [(group.example.uid, completion) for group in groups for completion in group.completions]
    for uid, completion in completions:
        if num_spanned(completion) != completion.num_sampled:
            raise TrainingError(
                _reported(
                    uid,
                    f"rollout engines have sampled {num_spanned(completion)} tokens, and {completion.num_sampled} of "
                    f"{len(completion.token_ids)} count as sampled",
                )
            )
    num_trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    num_masked = sum(completion.num_sampled for _, completion in completions) - num_trained
    return {"tokens/trained": MetricValue.sum(num_trained), "tokens/masked": MetricValue.sum(num_masked)}


class TokenAccount:
    """Counts what becomes of sampled tokens, and prints it at the end of a run. A context manager."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._counts:
            return
        fates = ", ".join(f"{self._counts[fate]:,} {fate}" for fate in FATES)
        print(f"{self._title}: sampled {self._counts.total():,} tokens: {fates}", flush=True)

    def add(self, metrics: Metrics) -> None:
        """Adds the counts of a step."""
        self._counts.update({fate: int(metrics[f"tokens/{fate}"].result()) for fate in FATES})


def _span_of(read: list[int], sampled: list[int]) -> SampledSpan:
    whole = read + sampled
    return SampledSpan(start=len(read), end=len(whole), digest=checksum(torch.tensor(whole)))


def _fault(token_ids: Tensor, loss_mask: Tensor, spans: Sequence[SampledSpan]) -> str | None:
    """Says what is wrong with one sequence, token_ids [L] int64 and loss_mask [L] bool; None if nothing is."""
    is_sampled = torch.zeros_like(loss_mask)
    for span in spans:
        if span.end > len(token_ids):
            return f"tokens {span.start} to {span.end - 1} were sampled, and {len(token_ids)} are left"
        if checksum(token_ids[: span.end]) != span.digest:
            return (
                f"tokens {span.start} to {span.end - 1} of {len(token_ids)}, or tokens before them, are not those that "
                "were sampled"
            )
        is_sampled[span.start : span.end] = True
    others = (loss_mask & ~is_sampled).nonzero().flatten()
    return f"token {int(others[0])} of {len(token_ids)} is trained, and was not sampled" if len(others) else None


def _reported(uid: str, fault: str) -> str:
    return f"tokens trained are not the tokens sampled: of row {uid} {fault}; an error of Shardwise's, please report it"
