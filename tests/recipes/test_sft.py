import pytest
import torch

from shardwise.recipes.sft import validate


@pytest.mark.parametrize("size", [1, 3])
def test_validation_loss_is_the_mean_over_trained_tokens(fake_group, remote, samples, size):
    def score(rank, batches, role, with_adapters):
        assert (role, with_adapters) == ("policy", True)
        return [torch.where(batch.loss_mask, -0.5 * batch.input_ids, 0.0) for batch in batches]

    metrics = validate(remote(fake_group(size, score=score), max_tokens_per_micro_batch=9), samples)
    assert metrics["val/loss"].result() == pytest.approx(0.5 * 27 / 10)
