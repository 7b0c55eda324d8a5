import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.algorithms.policy_loss import reinforce
from shardwise.algorithms.token_advantages import gae, reinforce_plus_plus, reverse_kl_advantages

NAN = float("nan")


@st.composite
def steps(draw):
    num_samples, width = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    size = num_samples * width
    number = st.floats(-5, 5, width=32)
    arrays = [draw(st.lists(number, min_size=size, max_size=size)) for _ in range(2)]
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    rewards, values = (torch.tensor(a).view(num_samples, width) for a in arrays)
    return rewards, torch.tensor(mask).view(num_samples, width), values


def loop_gae(rewards, loss_mask, values, gamma, lam):
    """GAE's sum over future deltas (eq. 16), on the trained tokens of each sample as if there were no others."""
    advantages, returns = np.zeros(rewards.shape), np.zeros(rewards.shape)
    for i in range(len(rewards)):
        places = [t for t in range(rewards.shape[1]) if loss_mask[i, t]]
        r = [float(rewards[i, t]) for t in places]
        v = [float(values[i, t]) for t in places] + [0.0]
        deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(places))]
        for k, t in enumerate(places):
            advantages[i, t] = sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(places)))
            returns[i, t] = advantages[i, t] + v[k]
    return advantages, returns


def loop_whitened(advantages, mask):
    mask = mask.numpy()
    if not mask.any():
        return np.zeros(advantages.shape)
    variance = np.var(advantages[mask], ddof=1) if mask.sum() > 1 else 0.0
    return np.where(mask, (advantages - advantages[mask].mean()) / np.sqrt(variance + 1e-8), 0.0)


@pytest.mark.parametrize("whiten", [False, True])
@settings(max_examples=60)
@given(step=steps(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_equals_the_sum_over_future_deltas(whiten, step, gamma, lam):
    rewards, loss_mask, values = step
    expected, expected_returns = loop_gae(*step, gamma, lam)
    advantages, returns = gae(rewards, loss_mask, values, gamma=gamma, lam=lam, whiten=whiten)
    assert advantages.dtype == returns.dtype == torch.float32
    np.testing.assert_allclose(returns, expected_returns, rtol=1e-5, atol=1e-5)
    expected = loop_whitened(expected, loss_mask) if whiten else expected
    # dividing by sqrt(1e-8) magnifies rounding where the advantages are all but equal
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-4)


def test_gae_by_hand_across_a_tool_call():
    # trained tokens 1 and 4, a tool result between them; values 1 and 2, reward 4 at the end
    loss_mask = torch.tensor([[False, True, False, False, True, False]])
    rewards = torch.tensor([[9.0, 0.0, 9.0, 9.0, 4.0, 9.0]])
    values = torch.tensor([[NAN, 1.0, NAN, 7.0, 2.0, NAN]])
    advantages, returns = gae(rewards, loss_mask, values, gamma=0.5, lam=0.5, whiten=False)
    # delta(4) = 4 - 2 = 2; delta(1) = 0 + 1/2 x 2 - 1 = 0; A(1) = 0 + 1/4 x 2
    assert advantages.tolist() == [[0.0, 0.5, 0.0, 0.0, 2.0, 0.0]]
    assert returns.tolist() == [[0.0, 1.5, 0.0, 0.0, 4.0, 0.0]]


@given(step=steps(), gamma=st.floats(0, 1))
def test_gae_with_lam_1_is_the_return_minus_the_value(step, gamma):
    rewards, loss_mask, values = step
    _, returns = gae(rewards, loss_mask, values, gamma=gamma, lam=1.0, whiten=True)
    _, plain_returns = gae(rewards, loss_mask, torch.zeros_like(values), gamma=gamma, lam=1.0, whiten=False)
    torch.testing.assert_close(returns, plain_returns, atol=1e-4, rtol=1e-4)


@given(step=steps(), gamma=st.floats(0, 1))
def test_reinforce_plus_plus_equals_discounted_sums_whitened(step, gamma):
    rewards, loss_mask, _ = step
    returns, _ = loop_gae(rewards, loss_mask, torch.zeros_like(rewards), gamma, 1.0)
    advantages = reinforce_plus_plus(rewards, loss_mask, torch.zeros(len(rewards)), gamma=gamma)
    np.testing.assert_allclose(advantages, loop_whitened(returns, loss_mask), rtol=1e-4, atol=1e-4)


def test_trap_07_the_return_reaches_the_turn_before_a_tool_call():
    """Where the mask ends a trajectory, the first turn of a conversation gets no reward at all."""
    loss_mask = torch.tensor([[True, False, True], [True, False, True]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    advantages = reinforce_plus_plus(rewards, loss_mask, torch.tensor([0, 1]), gamma=1.0)
    # returns 1, 1 | 0, 0: mean 1/2, unbiased variance 1/3
    expected = 0.5 * np.sqrt(3)
    np.testing.assert_allclose(advantages, [[expected, 0, expected], [-expected, 0, -expected]], rtol=1e-6)


@given(step=steps(), data=st.data())
def test_order_and_padding_do_not_matter(step, data):
    order = torch.tensor(data.draw(st.permutations(range(len(step[0])))))
    width = data.draw(st.integers(0, 3))
    changed = [torch.nn.functional.pad(array[order], (width, 2)) for array in step]
    end = width + step[0].shape[1]
    pairs = zip(
        gae(*changed, gamma=0.9, lam=0.8, whiten=True), gae(*step, gamma=0.9, lam=0.8, whiten=True), strict=True
    )
    for found, expected in pairs:
        torch.testing.assert_close(found[:, width:end], expected[order], atol=1e-4, rtol=1e-4)
        assert not found[:, :width].any()
        assert not found[:, end:].any()


@given(step=steps(), data=st.data())
def test_order_and_padding_do_not_matter_to_reinforce_plus_plus(step, data):
    order = torch.tensor(data.draw(st.permutations(range(len(step[0])))))
    width = data.draw(st.integers(0, 3))
    groups = torch.zeros(len(order), dtype=torch.int64)
    rewards, loss_mask = (torch.nn.functional.pad(array[order], (width, 2)) for array in step[:2])
    found = reinforce_plus_plus(rewards, loss_mask, groups, gamma=0.9)
    expected = torch.nn.functional.pad(reinforce_plus_plus(*step[:2], groups, gamma=0.9)[order], (width, 2))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mask", [[[False, False]], [[False, True]]])
def test_f35_nothing_or_a_single_token_to_whiten_is_zero(mask):
    """Trap 8: an empty response, and one that is only its end token."""
    loss_mask = torch.tensor(mask)
    advantages, returns = gae(torch.ones(1, 2), loss_mask, torch.full((1, 2), 0.25), gamma=1.0, lam=1.0, whiten=True)
    assert not advantages.any()
    assert returns.tolist() == loss_mask.float().tolist()
    assert not reinforce_plus_plus(torch.ones(1, 2), loss_mask, torch.tensor([0]), gamma=1.0).any()


def test_distillation_advantage_is_the_teachers_lead_on_trained_tokens():
    nan = float("nan")
    logprobs = torch.tensor([[nan, -1.0, -2.0]], requires_grad=True)
    advantages = reverse_kl_advantages(logprobs, torch.tensor([[nan, -0.5, -4.0]]), torch.tensor([[False, True, True]]))
    assert advantages.tolist() == [[0.0, 0.5, -2.0]]
    assert not advantages.requires_grad


@given(data=st.data(), num_samples=st.integers(1, 5), width=st.integers(1, 4), left=st.integers(0, 2))
def test_order_and_padding_do_not_matter_to_distillation(data, num_samples, width, left):
    shape = (num_samples, width)
    numbers = st.lists(st.floats(-20, 0, width=32), min_size=num_samples * width, max_size=num_samples * width)
    student, teacher = (torch.tensor(data.draw(numbers)).view(shape) for _ in range(2))
    mask = student > data.draw(st.floats(-20, 0))
    order = torch.tensor(data.draw(st.permutations(range(num_samples))))
    changed = [torch.nn.functional.pad(array[order], (left, 2)) for array in (student, teacher, mask)]
    expected = torch.nn.functional.pad(reverse_kl_advantages(student, teacher, mask)[order], (left, 2))
    assert reverse_kl_advantages(*changed).tolist() == expected.tolist()


def test_expected_gradient_of_distillation_is_that_of_the_reverse_kl():
    """Over a whole vocabulary, weighted by the student's probabilities: what sampling gives on average."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    mask, cu_seqlens = torch.ones(6, dtype=torch.bool), torch.arange(7, dtype=torch.int32)
    advantages = reverse_kl_advantages(logprobs[None], teacher[None], mask[None])[0]
    losses, _ = reinforce(logprobs, logprobs.detach(), advantages, mask, cu_seqlens)
    found = torch.autograd.grad((logprobs.detach().exp() * losses).sum(), logits, retain_graph=True)[0]
    expected = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits)[0]
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
