import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.algorithms.groups import (
    group_deviations,
    group_maxima,
    group_means,
    group_sums,
    has_baseline,
    sample_outcomes,
    spread_over_tokens,
)

samples = st.lists(st.tuples(st.floats(-10, 10), st.booleans(), st.integers(-1, 2)), min_size=1, max_size=10)


def arrays(samples):
    values, counted, groups = zip(*samples, strict=True)
    return torch.tensor(values, dtype=torch.float64), torch.tensor(counted), torch.tensor(groups)


@given(samples=samples)
def test_statistics_equal_loops_over_the_members(samples):
    values, counted, groups = arrays(samples)
    deviations, std = group_deviations(values, counted, groups)
    for i, (value, is_counted, group) in enumerate(samples):
        everyone = [v for v, _, g in samples if g == group]
        members = [v for v, c, g in samples if g == group and c]
        mean = np.mean(members) if members else 0.0
        np.testing.assert_allclose(group_sums(values, groups)[i], sum(everyone), atol=1e-12)
        assert group_maxima(values, groups)[i] == max(everyone)
        np.testing.assert_allclose(group_means(values, counted, groups)[i], mean, atol=1e-12)
        np.testing.assert_allclose(deviations[i], value - mean if is_counted else 0.0, atol=1e-12)
        np.testing.assert_allclose(std[i], np.std(members, ddof=1) if len(members) > 1 else 0.0, atol=1e-12)
        assert has_baseline(counted, groups)[i] == (is_counted and len(members) > 1)


def test_outcomes_ignore_what_is_not_trained():
    token_rewards = torch.tensor([[math.nan, 1.0, 2.0], [5.0, math.inf, 7.0]])
    outcomes, counted = sample_outcomes(token_rewards, torch.tensor([[False, True, True], [False, False, False]]))
    assert outcomes.tolist() == [3.0, 0.0]
    assert outcomes.dtype == torch.float64
    assert counted.tolist() == [True, False]


def test_spread_over_tokens():
    loss_mask = torch.tensor([[True, False], [True, True]])
    assert spread_over_tokens(torch.tensor([2.0, math.nan]), loss_mask)[0].tolist() == [2.0, 0.0]
