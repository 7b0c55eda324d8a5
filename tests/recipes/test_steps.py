"""One shard for each group of ranks that share sequences."""

import pytest
from shardwise.recipes.steps import token_logprobs, train_step

from shardwise.config import EngineConfig
from shardwise.types import MetricValue


@pytest.mark.parametrize(("size", "ulysses_size"), [(1, 1), (2, 1), (3, 1), (4, 2), (2, 2)])
def test_train_step_sends_every_sample_once_with_the_counts_of_the_whole_step(fake_group, samples, size, ulysses_size):
    def train(rank, batches, denominators):
        tokens = [sum(batch.input_ids[batch.loss_mask].tolist()) for batch in batches]
        return {"train/loss": MetricValue.sum(float(sum(tokens))), "x": MetricValue.mean(rank, 1)}

    group = fake_group(size, train=train)
    metrics = train_step(group, samples, EngineConfig(ulysses_size=ulysses_size, max_tokens_per_micro_batch=9))
    # Trained tokens of each sample times its token id: 3*1 + 1*2 + 2*3 + 4*4.
    assert metrics["train/loss"].result() == 27
    assert metrics["x"].result() == pytest.approx((size / ulysses_size - 1) / 2)
    assert metrics["train/num_tokens"].result() == 10
    assert metrics["train/num_sequences"].result() == 4
    ((_, shards, denominators),) = group.calls
    assert (denominators.num_tokens, denominators.num_sequences) == (10, 4)
    assert len(shards) == size // ulysses_size
    assert len({len(shard) for shard in shards}) == 1
    assert max(len(batch.input_ids) for shard in shards for batch in shard) <= 9


@pytest.mark.parametrize(("size", "ulysses_size"), [(1, 1), (4, 2)])
def test_token_logprobs_come_back_in_the_order_of_the_samples(fake_group, samples, size, ulysses_size):
    group = fake_group(size, score=lambda _, batches: [batch.input_ids * 0.5 for batch in batches])
    layout = EngineConfig(ulysses_size=ulysses_size, max_tokens_per_micro_batch=9)
    found = token_logprobs(group, samples, layout, method="score")
    assert [values.tolist() for values in found] == [(s.token_ids * 0.5).tolist() for s in samples]
