import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.algorithms import gigpo, grpo, turn_metrics

WIDTH = 6


def step_of(*samples):
    """Each sample: (group, [(state, reward of the turn), ...]); a turn is two tokens, one masked token before it."""
    num_turns = max(len(turns) for _, turns in samples)
    shape = (len(samples), 3 * num_turns)
    rewards, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    turn_ids = torch.zeros(shape, dtype=torch.int64)
    states = torch.zeros(len(samples), num_turns, dtype=torch.int64)
    for i, (_, turns) in enumerate(samples):
        for k, (state, reward) in enumerate(turns):
            mask[i, 3 * k + 1 : 3 * k + 3] = True
            turn_ids[i, 3 * k + 1 : 3 * k + 3] = k
            rewards[i, 3 * k + 2] = reward
            rewards[i, 3 * k] = 100.0  # not trained: ignored
            states[i, k] = state
    return rewards, mask, torch.tensor([group for group, _ in samples]), turn_ids, states


def test_turns_are_compared_with_turns_that_answered_the_same_state_by_hand():
    """Three completions of one prompt (state 1); two of them come to state 2, one of them twice."""
    step = step_of((0, [(1, 0.0), (2, 0.0), (2, 8.0)]), (0, [(1, 0.0), (2, 2.0)]), (0, [(1, 2.0)]))
    found = gigpo(*step, scale="none", step_weight=0.5, gamma=0.5)
    # Returns at state 1: 8 / 4, 2 / 2, 2; mean 5/3. At state 2: 8 / 2, 8, 2; mean 14/3. Completions: 8, 2, 2; mean 4.
    first, second = [2 - 5 / 3, 1 - 5 / 3, 2 - 5 / 3], [4 - 14 / 3, 8 - 14 / 3, 2 - 14 / 3]
    expected = [
        [4 + first[0] / 2, 4 + second[0] / 2, 4 + second[1] / 2],
        [-2 + first[1] / 2, -2 + second[2] / 2, 0],
        [-2 + first[2] / 2, 0, 0],
    ]
    for turn in range(3):
        assert torch.allclose(found[:, 3 * turn + 1], torch.tensor(expected)[:, turn], atol=1e-6)
        assert torch.equal(found[:, 3 * turn + 1], found[:, 3 * turn + 2])
        assert not found[:, 3 * turn].any()


def test_without_weight_it_is_grpo_and_a_lone_state_adds_nothing():
    step = step_of((0, [(1, 0.0), (2, 1.0)]), (0, [(1, 0.0), (3, 0.0)]))
    plain = grpo(*step[:3], scale="std")
    assert torch.equal(gigpo(*step, scale="std", step_weight=0.0, gamma=1.0), plain)
    both = gigpo(*step, scale="std", step_weight=1.0, gamma=1.0)
    assert torch.equal(both[:, 4:6], plain[:, 4:6])
    assert torch.allclose(both[:, 1:3], 2 * plain[:, 1:3])  # the prompt is a state that all have answered
    assert turn_metrics(step[1], step[3], step[4])["advantage/lone_turn_fraction"].result() == 0.5


def loop_gigpo(samples, weight, gamma, scale):
    """The paper's equations as loops: (sample, turn) -> advantage."""

    def normal(value, values):
        if len(values) < 2:
            return 0.0
        return (value - np.mean(values)) / (np.std(values, ddof=1) + 1e-6 if scale == "std" else 1.0)

    returns = {}
    for i, (_, turns) in enumerate(samples):
        for k in range(len(turns)):
            returns[i, k] = sum(gamma ** (j - k) * turns[j][1] for j in range(k, len(turns)))
    totals = [sum(reward for _, reward in turns) for _, turns in samples]
    found = {}
    for (i, k), value in returns.items():
        group, turns = samples[i]
        peers = [returns[j, n] for j, n in returns if samples[j][0] == group and samples[j][1][n][0] == turns[k][0]]
        completions = [totals[j] for j in range(len(samples)) if samples[j][0] == group and samples[j][1]]
        found[i, k] = normal(totals[i], completions) + weight * normal(value, peers)
    return found


turn = st.tuples(st.integers(0, 2), st.floats(-3, 3, width=16))
episodes = st.lists(st.tuples(st.integers(0, 1), st.lists(turn, min_size=0, max_size=3)), min_size=1, max_size=7)


def numbered(samples):
    """States of different groups are different states."""
    return [(group, [(3 * group + state, reward) for state, reward in turns]) for group, turns in samples]


@settings(max_examples=60, deadline=None)
@given(episodes, st.sampled_from(["std", "none"]), st.floats(0, 1), st.randoms())
def test_any_step_equals_the_loops_in_any_order(samples, scale, gamma, random):
    samples = numbered(samples)
    if not any(turns for _, turns in samples):
        samples = [*samples, (0, [(0, 1.0)])]
    random.shuffle(samples)
    found = gigpo(*step_of(*samples), scale=scale, step_weight=0.7, gamma=gamma)
    expected = loop_gigpo(samples, 0.7, gamma, scale)
    for i, (_, turns) in enumerate(samples):
        for k in range(found.shape[1] // 3):
            value = expected[i, k] if k < len(turns) else 0.0
            assert float(found[i, 3 * k + 1]) == pytest.approx(value, rel=1e-4, abs=1e-4)


def test_padding_changes_nothing():
    step = step_of((0, [(1, 0.0), (2, 1.0)]), (0, [(1, 0.5)]), (1, [(3, 1.0), (4, 0.0)]), (1, []))
    wider = [torch.nn.functional.pad(array, (0, 2)) if array.dim() == 2 else array for array in step]
    options = {"scale": "std", "step_weight": 1.0, "gamma": 0.9}
    assert torch.equal(gigpo(*wider, **options)[:, :-2], gigpo(*step, **options))
    assert not gigpo(*step, **options)[3].any()
