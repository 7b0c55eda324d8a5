"""Selections bound to samples, against covariances in numpy."""

import numpy as np
import torch
from noisy_samples import two_groups, with_noise

from shardwise.config import AlgorithmConfig
from shardwise.recipes.token_selection import with_selection


def test_clip_cov_and_kl_cov_select_tokens_of_the_whole_optimizer_step(make_group):
    samples = list(with_noise(two_groups(make_group), "old_logprobs", "advantages"))
    values = [(float(s.old_logprobs[t]), float(s.advantages[t]), (n, t)) for n, s in enumerate(samples)
              for t in np.flatnonzero(s.loss_mask)]  # fmt: skip
    logprobs, advantages = np.array([v[0] for v in values]), np.array([v[1] for v in values])
    covariance = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    largest = [values[i][2] for i in np.argsort(-covariance)[: int(0.25 * len(values))]]
    kl_cov = AlgorithmConfig(policy_loss={"name": "kl_cov", "fraction": 0.25}, num_epochs=2)
    found = with_selection(samples, kl_cov, seed=0)
    chosen = [(n, int(t)) for n, s in enumerate(found) for t in np.flatnonzero(s.selected)]
    assert sorted(chosen) == sorted((n, int(t)) for n, t in largest)
    assert all(s.selected.dtype == torch.bool and s.selected.shape == s.token_ids.shape for s in found)

    low, high = np.sort(covariance)[3] + 1e-6, np.sort(covariance)[-2] - 1e-6
    inside = {values[i][2] for i in np.flatnonzero((covariance > low) & (covariance < high))}
    clip_cov = AlgorithmConfig(policy_loss={"name": "clip_cov", "fraction": 0.2, "cov_low": low, "cov_high": high})
    draws = []
    for seed in range(12):
        found = with_selection(samples, clip_cov, seed=seed)
        draws.append(frozenset((n, t) for n, s in enumerate(found) for t in np.flatnonzero(s.selected).tolist()))
        assert len(draws[-1]) == int(0.2 * len(values))
        assert draws[-1] <= {(n, int(t)) for n, t in inside}
    assert len(set(draws)) > 1
    assert with_selection(samples, AlgorithmConfig(policy_loss="gspo"), seed=0) == samples
