"""Corrections bound to samples, against loops in numpy."""

import math

import numpy as np
import pytest
from noisy_samples import as_lists, two_groups, with_noise

from shardwise.config import AlgorithmConfig, TrainingError
from shardwise.recipes.rollout_correction import with_rollout_correction

OWN = """
import torch

def truncated(old_logprobs, rollout_logprobs, loss_mask, high=2.0):
    # The built-in truncation by other means; what it says about tokens that are not trained is not read.
    ratio = (old_logprobs.double() - rollout_logprobs.double()).exp()
    return torch.where(loss_mask, torch.minimum(ratio, torch.tensor(high)), float("nan"))

def within(old_logprobs, rollout_logprobs, loss_mask, low, high):
    ratio = (old_logprobs.double() - rollout_logprobs.double()).exp()
    return (ratio >= low) & (ratio <= high) | ~loss_mask

def no_mask(old_logprobs, rollout_logprobs, loss_mask):
    return loss_mask.float()

def half(old_logprobs, rollout_logprobs, loss_mask):
    return 0.5

def infinite(old_logprobs, rollout_logprobs, loss_mask):
    return old_logprobs / 0
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "rules.py").write_text(OWN)
    return lambda name: f"{tmp_path / 'rules.py'}:{name}"


def corrected(samples, **correction):
    return with_rollout_correction(samples, AlgorithmConfig(rollout_correction=correction))


def test_without_a_correction_samples_stay_what_they_are(make_group):
    samples = two_groups(make_group)
    for correction in ({}, {"bypass": True}):
        assert corrected(samples, **correction) == (samples, {})


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("mode", "low"), [("truncate", None), ("mask", 0.5)])
def test_weights_are_policy_over_rollout_probability(make_group, level, mode, low):
    samples = list(with_noise(two_groups(make_group), "old_logprobs", "rollout_logprobs"))
    found, metrics = corrected(samples, weights={"level": level, "mode": mode, "low": low, "high": 1.5})
    expected, bounded = [], []
    for sample in samples:
        gaps = (sample.old_logprobs - sample.rollout_logprobs).double().numpy()
        for t in np.flatnonzero(sample.loss_mask):
            ratio = math.exp(gaps.sum() if level == "sequence" else gaps[t])
            inside = mode == "truncate" or 0.5 <= ratio <= 1.5
            expected.append(min(ratio, 1.5) if mode == "truncate" else ratio * inside)
            bounded.append(ratio > 1.5)
    weights = np.concatenate([s.importance_weights[s.loss_mask].numpy() for s in found])
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    assert 0 < sum(bounded) < len(bounded), "the bound is part of the test"
    assert [s.loss_mask.tolist() for s in found] == [s.loss_mask.tolist() for s in samples]
    assert all(s.importance_weights.shape == s.token_ids.shape for s in found)
    assert metrics["rollout/weight"].result() == pytest.approx(np.mean(expected), rel=1e-5)
    if mode == "truncate":
        assert metrics["rollout/weight_truncated_fraction"].result() == pytest.approx(np.mean(bounded))


def test_weights_and_rejection_of_ones_own_correct_as_the_built_in_ones(make_group, own):
    samples = list(with_noise(two_groups(make_group), "old_logprobs", "rollout_logprobs"))
    bounds = {"low": 0.6, "high": 1.6}
    found, metrics = corrected(
        samples,
        weights={"name": "custom", "function": own("truncated"), "parameters": {"high": 1.5}},
        rejection={"name": "custom", "function": own("within"), "parameters": bounds},
    )
    expected, others = corrected(samples, weights={"high": 1.5}, rejection=bounds)
    assert as_lists(found, "importance_weights", "loss_mask") == as_lists(expected, "importance_weights", "loss_mask")
    assert 0 < metrics["rollout/rejected_fraction"].result() < 1
    bounded = "rollout/weight_truncated_fraction"
    assert others.pop(bounded).result() > metrics.pop(bounded).result() == 0  # its bound is not known
    assert {name: value.result() for name, value in metrics.items()} == {
        name: value.result() for name, value in others.items()
    }


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("weights", "half", "a float, expected a tensor of shape [6, 6], one finite weight for each trained token"),
        ("weights", "infinite", "a tensor with elements that are not finite, expected a tensor of shape [6, 6], one "
         "finite weight for each trained token"),
        ("rejection", "no_mask", "a tensor of torch.float32, expected a bool tensor of shape [6, 6], true for each "
         "token that stays"),
    ],
)  # fmt: skip
def test_what_a_correction_of_ones_own_returns_is_checked(make_group, own, key, name, message):
    samples = list(with_noise(two_groups(make_group), "old_logprobs", "rollout_logprobs"))
    with pytest.raises(TrainingError) as error:
        corrected(samples, **{key: own(name)})
    assert str(error.value) == f"algorithm.rollout_correction.{key}={own(name)} returned {message}"


def test_rejected_tokens_leave_the_loss_and_keep_weight_one(make_group):
    samples = list(with_noise(two_groups(make_group), "old_logprobs", "rollout_logprobs"))
    found, metrics = corrected(samples, rejection={"estimator": "k1", "low": 0.6, "high": 1.6})
    num_kept = num_trained = 0
    for before, after in zip(samples, found, strict=True):
        ratios = (before.old_logprobs - before.rollout_logprobs).exp()
        expected = before.loss_mask & (ratios >= 0.6) & (ratios <= 1.6)
        assert after.loss_mask.tolist() == expected.tolist()
        assert after.importance_weights[before.loss_mask].tolist() == [1.0] * int(before.loss_mask.sum())
        num_kept, num_trained = num_kept + int(expected.sum()), num_trained + int(before.loss_mask.sum())
    assert 0 < num_kept < num_trained
    assert metrics["rollout/rejected_fraction"].result() == pytest.approx(1 - num_kept / num_trained)
    assert metrics["rollout/weight_truncated_fraction"].result() == 0
