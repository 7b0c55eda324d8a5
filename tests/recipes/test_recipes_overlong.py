import pytest
import torch
from noisy_samples import rewritten

from shardwise.config import AlgorithmConfig
from shardwise.recipes.overlong import with_overlong_penalty
from shardwise.recipes.sampling.samples import to_samples


def test_the_overlong_penalty_grows_over_the_buffer(make_group):
    lengths = [1, 6, 7, 8, 10]
    samples = to_samples([make_group([1.0] * 5, lengths=lengths)])
    algorithm = AlgorithmConfig(overlong_penalty={"buffer_tokens": 4, "factor": 2.0})
    found = [sample.reward for sample in with_overlong_penalty(samples, algorithm, max_tokens=10)]
    assert found == pytest.approx([1.0, 1.0, 1.0 - 2 / 4, 1.0 - 4 / 4, 1.0 - 8 / 4])
    assert with_overlong_penalty(samples, AlgorithmConfig(), max_tokens=10) == samples


def test_the_overlong_penalty_counts_what_was_answered_between_the_turns(make_group):
    """rollout.max_response_tokens bounds it too."""
    (sample,) = to_samples([make_group([1.0], lengths=[8])])
    answered = sample.loss_mask.clone()
    answered[-5:-1] = False
    algorithm = AlgorithmConfig(overlong_penalty={"buffer_tokens": 4})
    (found,) = with_overlong_penalty([rewritten(sample, loss_mask=answered)], algorithm, max_tokens=10)
    assert found.reward == pytest.approx(1.0 - 2 / 4)
    nothing = rewritten(sample, loss_mask=torch.zeros_like(answered))
    assert with_overlong_penalty([nothing], algorithm, max_tokens=10)[0].reward == 1.0
