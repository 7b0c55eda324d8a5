import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.algorithms.group_advantages import (
    gdpo,
    gpg,
    group_metrics,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    outcome_token_rewards,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)


def parts_of(token_rewards):
    return {"sum": token_rewards.sum(1), "first": token_rewards[:, 0]}


def gdpo_of(token_rewards, loss_mask, group_ids):
    return gdpo(token_rewards, loss_mask, group_ids, parts_of(token_rewards), weights={"first": -0.5})


def gpg_of(token_rewards, loss_mask, group_ids):
    return gpg(token_rewards, loss_mask, group_ids, outcomes_of(token_rewards, loss_mask))


def maxrl_of(token_rewards, loss_mask, group_ids):
    rewards = token_rewards.abs()
    return maxrl(rewards, loss_mask, group_ids, outcomes_of(rewards, loss_mask))


def outcomes_of(token_rewards, loss_mask):
    return torch.where(loss_mask, token_rewards.double(), 0.0).sum(1)


def remax_of(token_rewards, loss_mask, group_ids):
    return remax(token_rewards, loss_mask, group_ids, greedy_of(token_rewards))


def greedy_of(token_rewards):
    """Of every sample a baseline of its own, which padding and order do not change."""
    return token_rewards.abs().amax(1)


ESTIMATORS = {
    "grpo": lambda *arrays: grpo(*arrays, scale="std"),
    "dr_grpo": lambda *arrays: grpo(*arrays, scale="none"),
    "passk": lambda *arrays: grpo_passk(*arrays, scale="std"),
    "passk_unscaled": lambda *arrays: grpo_passk(*arrays, scale="none"),
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg_of,
    "maxrl": maxrl_of,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gdpo": gdpo_of,
}
"""All that compare the samples of a group."""

INVARIANT = ESTIMATORS | {"remax": remax_of}


def loop_grpo(outcome, group):
    return (outcome - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)


def loop_passk(outcome, group):
    second, best = sorted(group)[-2:]
    return best - second if outcome == best else 0.0


def loop_whitened(advantages, mask):
    tokens = advantages[mask]
    centered = tokens - tokens.mean() if tokens.size else tokens
    whitened = np.zeros(advantages.shape)
    whitened[mask] = centered / np.sqrt((centered**2).sum() / max(tokens.size - 1, 1) + 1e-8)
    return whitened


def loop_advantages(token_rewards, loss_mask, group_ids, estimator):
    """The formulas as loops in float64."""
    parts = {name: part.double().numpy() for name, part in parts_of(token_rewards).items()}
    token_rewards, loss_mask = token_rewards.double().numpy(), loss_mask.numpy()
    if estimator == "maxrl":
        token_rewards = np.abs(token_rewards)
    lengths = loss_mask.sum(1)
    outcomes = {i: token_rewards[i, loss_mask[i]].sum() for i in range(len(token_rewards)) if loss_mask[i].any()}
    advantages, compared = np.zeros(token_rewards.shape), np.zeros(token_rewards.shape, dtype=bool)
    for i, outcome in outcomes.items():
        members = [j for j in outcomes if group_ids[j] == group_ids[i]]
        group = [outcomes[j] for j in members]
        others = [outcomes[j] for j in members if j != i]
        if not others:
            continue
        match estimator:
            case "grpo":
                value = loop_grpo(outcome, group)
            case "dr_grpo" | "reinforce_plus_plus_baseline":
                value = outcome - np.mean(group)
            case "passk":
                value = loop_passk(outcome, group) / (np.std(group, ddof=1) + 1e-6)
            case "passk_unscaled":
                value = loop_passk(outcome, group)
            case "rloo":
                value = outcome - np.mean(others)
            case "opo":
                value = outcome - sum(lengths[j] * outcomes[j] for j in members) / sum(lengths[j] for j in members)
            case "gpg":
                num_nonzero = sum(r != 0 for r in outcomes.values())
                value = (outcome - np.mean(group)) * len(outcomes) / max(num_nonzero, 1)
            case "maxrl":
                value = (outcome - np.mean(group)) / np.mean(group) if np.mean(group) else 0.0
            case "gdpo":
                first = loop_grpo(parts["first"][i], [parts["first"][j] for j in members])
                value = loop_grpo(parts["sum"][i], [parts["sum"][j] for j in members]) - 0.5 * first
        advantages[i, loss_mask[i]] = value
        compared[i] = loss_mask[i]
    if estimator in ("reinforce_plus_plus_baseline", "gdpo"):
        return loop_whitened(advantages, compared)
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


@given(step=steps())
def test_remax_equals_a_loop(step):
    token_rewards, loss_mask, groups = step
    expected = np.zeros(loss_mask.shape)
    for i, (rewards, mask, greedy) in enumerate(zip(token_rewards, loss_mask, greedy_of(token_rewards), strict=True)):
        expected[i, mask.numpy()] = sum(rewards[mask].tolist()) - float(greedy)
    np.testing.assert_allclose(remax_of(token_rewards, loss_mask, groups), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=60)
@given(step=steps())
def test_estimators_equal_the_formulas_written_as_loops(name, step):
    expected = loop_advantages(*step, name)
    advantages = ESTIMATORS[name](*step)
    assert advantages.dtype == torch.float32
    # Where rewards differ by little more than rounding, std + 1e-6 magnifies the rounding of the sums (1e-15 / 1e-6),
    # and whitening does so once more (1e-9 / 1e-4).
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-4 if name == "gdpo" else 1e-6)


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


@pytest.mark.parametrize("name", INVARIANT)
@given(step=steps(), data=st.data())
def test_order_of_samples_does_not_matter(name, step, data):
    order = torch.tensor(data.draw(st.permutations(range(len(step[0])))))
    shuffled = INVARIANT[name](*(array[order] for array in step))
    expected = INVARIANT[name](*step)[order]
    torch.testing.assert_close(shuffled, expected, atol=1e-4 if name == "gdpo" else 1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", INVARIANT)
@settings(max_examples=30)
@given(step=steps(), left=st.integers(0, 2), right=st.integers(0, 2))
def test_padding_does_not_matter(name, step, left, right):
    token_rewards, loss_mask, groups = step
    token_rewards = token_rewards.clone()
    token_rewards[:, 0] = 0.0  # read by gdpo_of, and moved by padding
    padded = [torch.nn.functional.pad(a, (left, right), value=v) for a, v in ((token_rewards, 0.0), (loss_mask, False))]
    advantages = INVARIANT[name](*padded, groups)
    expected = torch.nn.functional.pad(INVARIANT[name](token_rewards, loss_mask, groups), (left, right))
    torch.testing.assert_close(advantages, expected, atol=1e-4 if name == "gdpo" else 1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_f35_every_estimator_is_defined_where_there_is_nothing_to_compare(name):
    """Trap 8: a group of one, a group without variance, a sample without trained tokens and one of a single token."""
    token_rewards, loss_mask, groups = step_of([5.0, 0.3, 0.3, 9.0, 1.0, 0.0], [7, 2, 2, 2, 4, 4])
    loss_mask[3] = False
    loss_mask[4, 1] = False
    advantages = ESTIMATORS[name](token_rewards, loss_mask, groups)
    assert advantages.isfinite().all()
    assert not advantages[0].any()
    assert not advantages[~loss_mask].any()
    assert advantages[4].any()
    if name not in ("reinforce_plus_plus_baseline", "gdpo"):  # whitening moves the zero
        assert not advantages[1:4].any()
    rewards = outcomes_of(token_rewards, loss_mask)[:, None]
    metrics = {name: value.result() for name, value in group_metrics(rewards, loss_mask, groups).items()}
    assert metrics["advantage/num_groups_without_baseline"] == 1
    assert metrics["advantage/num_zero_variance_groups"] == 1
    assert metrics["advantage/zero_variance_fraction"] == 0.5


def test_passk_by_hand():
    # group 0: best 1, second 1/2, unbiased variance of 0, 1/2, 1 is 1/4; group 1: two samples share the best
    step = step_of([0.0, 1.0, 0.5, 2.0, 2.0, 0.0], [0, 0, 0, 1, 1, 1])
    assert grpo_passk(*step, scale="none")[:, 1].tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert grpo_passk(*step, scale="std")[1, 1].item() == pytest.approx(0.5 / (0.5 + 1e-6))


def test_opo_weighs_by_length():
    # lengths 1 and 3, rewards 1 and 0: baseline 1 x 1 / 4
    loss_mask = torch.tensor([[True, False, False], [True, True, True]])
    token_rewards = outcome_token_rewards(torch.tensor([1.0, 0.0]), loss_mask)
    advantages = opo(token_rewards, loss_mask, torch.tensor([0, 0]))
    assert advantages.tolist() == [[0.75, 0.0, 0.0], [-0.25, -0.25, -0.25]]


def test_gpg_by_hand():
    # one of four samples has a reward: alpha 4, and mean 1/2 in its group
    assert gpg_of(*step_of([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1]))[:, 1].tolist() == [2.0, -2.0, 0.0, 0.0]
    assert not gpg_of(*step_of([0.0, 0.0], [0, 0])).any()


def test_gpg_counts_outcomes_and_not_penalties():
    # Outcomes 1, 0, 0, 0 less 0.5, 0.25, 0, 0: still one of four, alpha 4; the group's mean is 0.125.
    step = step_of([0.5, -0.25, 0.0, 0.0], [0, 0, 1, 1])
    advantages = gpg(*step, torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert advantages[:, 1].tolist() == [4 * 0.375, 4 * -0.375, 0.0, 0.0]
    # A correct answer whose penalty takes all of its reward is a correct answer.
    assert gpg(*step_of([0.0, 1.0], [0, 0]), torch.tensor([1.0, 1.0]))[:, 1].tolist() == [-0.5, 0.5]


def test_maxrl_by_hand():
    # solved once in four: (1 - 1/4) / (1/4); never solved, or a mean below 0: 0
    step = step_of([1.0, 0.0, 0.0, 0.0], [0] * 4)
    assert maxrl(*step, torch.tensor([1.0, 0.0, 0.0, 0.0]))[:, 1].tolist() == [3.0, -1.0, -1.0, -1.0]
    assert not maxrl(*step_of([0.0, 0.0], [0, 0]), torch.zeros(2)).any()
    assert not maxrl(*step_of([-1.0, -3.0], [0, 0]), torch.tensor([-1.0, -3.0])).any()


def test_maxrl_divides_by_the_outcomes_and_not_by_what_penalties_leave():
    # Solved once in four, less 0.5 for the correct one: R = 0.5, 0, 0, 0, their mean 0.125, the chance of success 1/4.
    solved = torch.tensor([1.0, 0.0, 0.0, 0.0])
    penalised = step_of([0.5, 0.0, 0.0, 0.0], [0] * 4)
    assert maxrl(*penalised, solved)[:, 1].tolist() == [1.5, -0.5, -0.5, -0.5]
    # Penalties of 1 for the wrong ones make the mean of R negative; the chance of success is 1/4 all the same.
    punished = step_of([1.0, -1.0, -1.0, -1.0], [0] * 4)
    assert maxrl(*punished, solved)[:, 1].tolist() == [6.0, -2.0, -2.0, -2.0]
    assert not maxrl(*step_of([0.0, -1.0], [0, 0]), torch.zeros(2)).any()


def test_reinforce_plus_plus_baseline_by_hand():
    # deviations 1/2, -1/2 | 0, 0 on two tokens each: mean 0, variance (4 x 1/4) / 7
    advantages = reinforce_plus_plus_baseline(*step_of([1.0, 0.0, 3.0, 3.0, 8.0], [0, 0, 1, 1, 2]))
    expected = 0.5 / np.sqrt(1 / 7 + 1e-8)
    assert advantages[:, 1].tolist() == pytest.approx([expected, -expected, 0.0, 0.0, 0.0])


def test_gdpo_keeps_a_part_that_another_one_would_hide():
    """Scores of 100 and a format of 1: in a sum the format is 1 % of the advantage, here each is 1 / sqrt 2."""
    _, loss_mask, groups = step_of([0.0] * 4, [0] * 4)
    parts = {"score": torch.tensor([100.0, 100.0, 0.0, 0.0]), "format": torch.tensor([1.0, 0.0, 1.0, 0.0])}
    advantages = gdpo(torch.zeros(4, 3), loss_mask, groups, parts, weights={})[:, 1]
    # each part is +-1/2 over an unbiased std of sqrt(1/3): the sums +a, 0, 0, -a, whitened over two tokens each
    expected = np.sqrt(7 / 4)
    assert advantages.tolist() == pytest.approx([expected, 0.0, 0.0, -expected], abs=1e-5)
    only_format = gdpo(torch.zeros(4, 3), loss_mask, groups, parts, weights={"score": 0.0})[:, 1]
    assert only_format.sign().tolist() == [1.0, -1.0, 1.0, -1.0]


def test_gdpo_refuses_parts_that_do_not_exist():
    step = step_of([1.0, 0.0], [0, 0])
    with pytest.raises(ValueError, match="weights for style, but the parts of the reward are score"):
        gdpo(*step, {"score": torch.zeros(2)}, weights={"style": 1.0})
    with pytest.raises(ValueError, match="only a score"):
        gdpo(*step, {}, weights={})


def test_remax_subtracts_the_greedy_reward_in_a_group_of_one_too():
    token_rewards, loss_mask, groups = step_of([1.0, 0.25, 3.0], [0, 0, 1])
    loss_mask[1] = False
    advantages = remax(token_rewards, loss_mask, groups, torch.tensor([0.5, 7.0, 4.0]))
    assert advantages.tolist() == [[0.0, 0.5, 0.5], [0.0, 0.0, 0.0], [0.0, -1.0, -1.0]]


@pytest.mark.parametrize("estimator", [grpo, grpo_passk])
def test_an_unknown_scale_is_refused(estimator):
    with pytest.raises(ValueError, match="scale=batch is not known; use std or none"):
        estimator(*step_of([1.0, 0.0], [0, 0]), scale="batch")


def test_trap_07_reward_lands_on_the_last_trained_token():
    """Behind it may be masked tokens; an empty response has none and loses nothing to a neighbour."""
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


def test_a_group_whose_parts_differ_teaches_something_though_their_sums_are_equal():
    _, loss_mask, groups = step_of([0.0] * 4, [0, 0, 1, 1])
    parts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    found = {name: value.result() for name, value in group_metrics(parts, loss_mask, groups).items()}
    assert found["advantage/num_zero_variance_groups"] == 1
    assert found["advantage/zero_variance_fraction"] == 0.5


def test_group_metrics_by_hand():
    # 0: one sample; 1: equal rewards; 2: different; 3: two samples of which one has no trained token
    token_rewards, loss_mask, groups = step_of([1.0, 0.1, 0.1, 0.1, 0.0, 1.0, 1.0, 1.0], [0, 1, 1, 1, 2, 2, 3, 3])
    loss_mask[7] = False
    metrics = group_metrics(outcomes_of(token_rewards, loss_mask)[:, None], loss_mask, groups)
    assert {name: value.result() for name, value in metrics.items()} == {
        "advantage/num_groups_without_baseline": 2.0,
        "advantage/num_zero_variance_groups": 1.0,
        "advantage/zero_variance_fraction": 0.5,
    }
