import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.algorithms.advantages import group_metrics, grpo, outcome_token_rewards, rloo

ESTIMATORS = {
    "grpo": lambda *arrays: grpo(*arrays, scale="std"),
    "dr_grpo": lambda *arrays: grpo(*arrays, scale="none"),
    "rloo": rloo,
}


def loop_advantages(token_rewards, loss_mask, group_ids, estimator):
    """The formulas as loops in float64."""
    token_rewards, loss_mask = token_rewards.double().numpy(), loss_mask.numpy()
    advantages = np.zeros(token_rewards.shape)
    outcomes = {}
    for i in range(len(token_rewards)):
        if loss_mask[i].any():
            outcomes[i] = sum(token_rewards[i, t] for t in range(loss_mask.shape[1]) if loss_mask[i, t])
    for i, outcome in outcomes.items():
        group = [r for j, r in outcomes.items() if group_ids[j] == group_ids[i]]
        others = [r for j, r in outcomes.items() if group_ids[j] == group_ids[i] and j != i]
        if not others:
            continue
        match estimator:
            case "grpo":
                value = (outcome - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
            case "dr_grpo":
                value = outcome - np.mean(group)
            case "rloo":
                value = outcome - np.mean(others)
        advantages[i, loss_mask[i]] = value
    return advantages


@st.composite
def steps(draw):
    num_samples, width = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    reward = st.floats(-10, 10, width=32)
    rewards = draw(st.lists(reward, min_size=num_samples * width, max_size=num_samples * width))
    mask = draw(st.lists(st.booleans(), min_size=num_samples * width, max_size=num_samples * width))
    groups = draw(st.lists(st.integers(-1, 3), min_size=num_samples, max_size=num_samples))
    shape = (num_samples, width)
    return torch.tensor(rewards).view(shape), torch.tensor(mask).view(shape), torch.tensor(groups)


def step_of(rewards, groups):
    """One masked prompt token and two trained ones per sample; the reward on the last."""
    loss_mask = torch.tensor([[False, True, True]] * len(rewards))
    return outcome_token_rewards(torch.tensor(rewards), loss_mask), loss_mask, torch.tensor(groups)


def test_grpo_by_hand():
    advantages = grpo(*step_of([1.0, 0.0, 0.0, 0.0], [3, 3, 3, 3]), scale="std")
    # mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4, std 1/2
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5])
    torch.testing.assert_close(advantages, expected[:, None] * torch.tensor([0.0, 1.0, 1.0]), atol=4e-6, rtol=0)


def test_dr_grpo_and_rloo_by_hand():
    step = step_of([1.0, 0.0, 0.0, 0.0], [3, 3, 3, 3])
    assert grpo(*step, scale="none")[:, 2].tolist() == [0.75, -0.25, -0.25, -0.25]
    assert rloo(*step)[:, 2].tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(deadline=None, max_examples=100)
@given(step=steps())
def test_estimators_equal_the_formulas_written_as_loops(name, step):
    expected = loop_advantages(*step, name)
    advantages = ESTIMATORS[name](*step)
    assert advantages.dtype == torch.float32
    # Where rewards differ by little more than rounding, std + 1e-6 magnifies the rounding of the sums (1e-15 / 1e-6).
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(reward=st.floats(-1e3, 1e3, width=32), num_samples=st.integers(2, 40))
def test_group_without_variance_is_exactly_zero(name, reward, num_samples):
    """In float32 ten rewards of 0.1 have a mean other than 0.1, and dividing by 1e-6 makes it visible."""
    advantages = ESTIMATORS[name](*step_of([reward] * num_samples, [0] * num_samples))
    assert not advantages.any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_group_of_one_is_zero_and_leaves_others_alone(name):
    advantages = ESTIMATORS[name](*step_of([5.0, 1.0, 3.0], [7, 2, 2]))
    assert not advantages[0].any()
    torch.testing.assert_close(advantages[1:], ESTIMATORS[name](*step_of([1.0, 3.0], [2, 2])))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_sample_without_trained_tokens_does_not_count(name):
    token_rewards, loss_mask, groups = step_of([1.0, 0.0, 0.5, 9.0], [0, 0, 0, 0])
    loss_mask[3] = False
    advantages = ESTIMATORS[name](token_rewards, loss_mask, groups)
    assert not advantages[3].any()
    torch.testing.assert_close(advantages[:3], ESTIMATORS[name](*step_of([1.0, 0.0, 0.5], [0, 0, 0])))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nothing_trained_is_all_zero(name):
    nothing = torch.zeros(3, 4, dtype=torch.bool)
    assert not ESTIMATORS[name](torch.ones(3, 4), nothing, torch.tensor([0, 0, 1])).any()


@pytest.mark.parametrize("name", ESTIMATORS)
@given(step=steps(), data=st.data())
def test_order_of_samples_does_not_matter(name, step, data):
    order = torch.tensor(data.draw(st.permutations(range(len(step[0])))))
    shuffled = ESTIMATORS[name](*(array[order] for array in step))
    torch.testing.assert_close(shuffled, ESTIMATORS[name](*step)[order], atol=1e-6, rtol=1e-5)


def test_grpo_refuses_an_unknown_scale():
    with pytest.raises(ValueError, match="scale=batch is not known; use std or none"):
        grpo(*step_of([1.0, 0.0], [0, 0]), scale="batch")


def test_reward_lands_on_the_last_trained_token():
    """Trap 7: behind it may be masked tokens; an empty response has none and loses nothing to a neighbour."""
    loss_mask = torch.tensor(
        [
            [False, True, True, True],
            [False, True, False, False],
            [False, True, False, True],
            [False, False, False, False],
        ]
    )
    assert outcome_token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), loss_mask).tolist() == [
        [0.0, 0.0, 0.0, 1.0],
        [0.0, 2.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 3.0],
        [0.0, 0.0, 0.0, 0.0],
    ]


@given(step=steps())
def test_outcome_is_the_reward_that_was_placed(step):
    _, loss_mask, _ = step
    rewards = torch.arange(1.0, len(loss_mask) + 1)
    placed = outcome_token_rewards(rewards, loss_mask)
    assert placed.sum(1).tolist() == torch.where(loss_mask.any(1), rewards, 0.0).tolist()
    assert not placed[~loss_mask].any()


def test_group_metrics_by_hand():
    # 0: one sample; 1: equal rewards; 2: different; 3: two samples of which one has no trained token
    token_rewards, loss_mask, groups = step_of([1.0, 0.1, 0.1, 0.1, 0.0, 1.0, 1.0, 1.0], [0, 1, 1, 1, 2, 2, 3, 3])
    loss_mask[7] = False
    metrics = group_metrics(token_rewards, loss_mask, groups)
    assert {name: value.result() for name, value in metrics.items()} == {
        "advantage/num_groups_without_baseline": 2.0,
        "advantage/num_zero_variance_groups": 1.0,
    }
