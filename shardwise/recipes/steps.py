"""What recipes let the ranks' engines do with samples: score their tokens, make an optimizer step on them."""

from collections.abc import Sequence

from torch import Tensor

from shardwise.config import LayoutConfig
from shardwise.controller.base import WorkerGroup
from shardwise.data import PackedStep, pack, unpack
from shardwise.types import Metrics, MetricValue, Sample, merge_metrics


def pack_for(group: WorkerGroup, samples: Sequence[Sample], layout: LayoutConfig) -> PackedStep:
    """One shard for each rank, or for each group of ranks that share their sequences."""
    return pack(samples, num_shards=group.size // layout.ulysses_size, max_tokens=layout.max_tokens_per_micro_batch)


def token_logprobs(group: WorkerGroup, samples: Sequence[Sample], layout: LayoutConfig, *, method: str) -> list[Tensor]:
    """The logprobs [L] of every sample, in order, from the workers' `method`."""
    packed = pack_for(group, samples, layout)
    return unpack(packed, group.scatter(method, packed.shards))


def train_step(group: WorkerGroup, samples: Sequence[Sample], layout: LayoutConfig) -> Metrics:
    """Packs the samples, spreads them over the ranks and makes one optimizer step.

    Returns:
        Metrics that merge over several optimizer steps: train/loss, train/num_tokens and train/num_sequences are means
        over the steps.
    """
    packed = pack_for(group, samples, layout)
    metrics = merge_metrics(group.scatter("train", packed.shards, packed.denominators))
    totals = {
        "train/loss": metrics["train/loss"].result(),  # the ranks' shares add up to the loss of the step
        "train/num_tokens": packed.denominators.num_tokens,
        "train/num_sequences": packed.denominators.num_sequences,
    }
    return metrics | {name: MetricValue.mean(total, 1) for name, total in totals.items()}
