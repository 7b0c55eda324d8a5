import pytest
import torch

from shardwise.config import EngineConfig
from shardwise.recipes.sft import validate


@pytest.mark.parametrize("size", [1, 3])
def test_validation_loss_is_the_mean_over_trained_tokens(fake_group, samples, size):
    def policy_logprobs(rank, batches):
        return [torch.where(batch.loss_mask, -0.5 * batch.input_ids, 0.0) for batch in batches]

    metrics = validate(
        fake_group(size, policy_logprobs=policy_logprobs), samples, EngineConfig(max_tokens_per_micro_batch=9)
    )
    assert metrics["val/loss"].result() == pytest.approx(0.5 * 27 / 10)
