import pytest
import torch

from shardwise.recipes.sft import train_step, validate
from shardwise.types import MetricValue, Sample


def samples():
    lengths = [5, 3, 4, 6]
    return [
        Sample(
            uid=str(i),
            token_ids=torch.full((length,), i + 1),
            loss_mask=torch.arange(length) >= 2,
        )
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_train_step_sends_every_sample_once_with_the_counts_of_the_whole_step(fake_group, size):
    def train(rank, batches, denominators):
        tokens = [sum(batch.input_ids[batch.loss_mask].tolist()) for batch in batches]
        return {"train/loss": MetricValue.sum(float(sum(tokens))), "x": MetricValue.mean(rank, 1)}

    group = fake_group(size, train=train)
    metrics = train_step(group, samples(), max_tokens=9)
    # Trained tokens of each sample times its token id: 3*1 + 1*2 + 2*3 + 4*4.
    assert metrics["train/loss"].result() == 27
    assert metrics["x"].result() == pytest.approx(sum(range(size)) / size)
    assert metrics["train/num_tokens"].result() == 10
    assert metrics["train/num_sequences"].result() == 4
    ((_, shards, denominators),) = group.calls
    assert (denominators.num_tokens, denominators.num_sequences) == (10, 4)
    assert len({len(shard) for shard in shards}) == 1
    assert max(len(batch.input_ids) for shard in shards for batch in shard) <= 9


@pytest.mark.parametrize("size", [1, 3])
def test_validation_loss_is_the_mean_over_trained_tokens(fake_group, size):
    def policy_logprobs(rank, batches):
        return [torch.where(batch.loss_mask, -0.5 * batch.input_ids, 0.0) for batch in batches]

    metrics = validate(fake_group(size, policy_logprobs=policy_logprobs), samples(), max_tokens=9)
    assert metrics["val/loss"].result() == pytest.approx(0.5 * 27 / 10)
