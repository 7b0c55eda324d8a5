import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.algorithms.kl import adaptive_kl_coef, kl_divergence

logprob = st.floats(-60, 0, width=32)


def loop_kl(logprob, ref_logprob, estimator):
    x = ref_logprob - logprob
    match estimator:
        case "k1":
            return -x
        case "abs":
            return abs(x)
        case "k2":
            return x * x / 2
        case "k3":
            x = min(max(x, -20.0), 20.0)
            return min(max(math.exp(x) - x - 1, -10.0), 10.0)


@pytest.mark.parametrize("suffix", ["", "+"])
@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
@settings(max_examples=50)
@given(pairs=st.lists(st.tuples(logprob, logprob), min_size=1, max_size=8))
def test_estimators_equal_the_formulas_written_as_loops(estimator, suffix, pairs):
    logprobs, ref_logprobs = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    expected = [loop_kl(p, q, estimator) for p, q in pairs]
    np.testing.assert_allclose(
        kl_divergence(logprobs, ref_logprobs, estimator=estimator + suffix), expected, atol=1e-12
    )


def test_estimators_by_hand():
    logprobs, ref_logprobs = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    values = [kl_divergence(logprobs, ref_logprobs, estimator=e).item() for e in ("k1", "abs", "k2", "k3")]
    assert values == pytest.approx([math.log(2), math.log(2), math.log(2) ** 2 / 2, 0.5 + math.log(2) - 1])


@given(pairs=st.lists(st.tuples(logprob, logprob), min_size=1, max_size=8))
def test_k3_lies_between_zero_and_ten(pairs):
    logprobs, ref_logprobs = torch.tensor(pairs).unbind(1)
    values = kl_divergence(logprobs, ref_logprobs, estimator="k3")
    assert values.min() >= -1e-7
    assert values.max() <= 10


def test_k3_clamps_cut_the_gradient():
    logprobs = torch.tensor([-200.0, -5.0, -1.0], requires_grad=True)  # e^199 overflows
    values = kl_divergence(logprobs, torch.tensor([-1.0, -1.0, -30.0]), estimator="k3")
    values.sum().backward()
    assert values.tolist() == [10.0, 10.0, 10.0]
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_gradient(estimator):
    logprobs = torch.tensor([-0.5, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref_logprobs = torch.tensor([-1.0, -0.9, -0.2], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda p: kl_divergence(p, ref_logprobs, estimator=estimator), logprobs)


def test_expected_gradients_are_what_the_docstring_says():
    """Over a whole vocabulary: k1 gives nothing, k2 the reverse KL's gradient, k3 the forward KL's."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ref = (logits.detach() + 0.5 * torch.randn(5, dtype=torch.float64)).log_softmax(0)  # near: k3 is not clamped

    def gradient(loss_of):
        logp = logits.log_softmax(0)
        return torch.autograd.grad(loss_of(logp), logits)[0]

    def estimated(estimator):
        return gradient(lambda logp: (logp.detach().exp() * kl_divergence(logp, ref, estimator=estimator)).sum())

    policy_to_ref = gradient(lambda logp: (logp.exp() * (logp - ref)).sum())
    ref_to_policy = gradient(lambda logp: (ref.exp() * (ref - logp)).sum())
    torch.testing.assert_close(estimated("k1"), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(estimated("k2"), policy_to_ref)
    torch.testing.assert_close(estimated("k3"), ref_to_policy)
    for estimator in ("k1+", "abs+", "k2+", "k3+"):
        torch.testing.assert_close(estimated(estimator), policy_to_ref)


def test_plus_has_the_gradient_of_k2_where_k3_is_clamped():
    logprobs = torch.tensor([-200.0, -1.0], requires_grad=True)
    values = kl_divergence(logprobs, torch.tensor([-1.0, -2.5]), estimator="k3+")
    values.sum().backward()
    assert values.tolist() == pytest.approx([10.0, math.exp(-1.5) + 0.5])
    assert logprobs.grad.tolist() == [-199.0, 1.5]


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="estimator=k4 is not known; use one of k1, abs, k2, k3, k1"):
        kl_divergence(torch.zeros(1), torch.zeros(1), estimator="k4")


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.5),  # on target
        (0.11, 0.5 * (1 + 0.1 * 64 / 1000)),  # 10 % above
        (5.0, 0.5 * (1 + 0.2 * 64 / 1000)),  # the error is clipped
        (0.0, 0.5 * (1 - 0.2 * 64 / 1000)),
        (-1.0, 0.5 * (1 - 0.2 * 64 / 1000)),
    ],
)
def test_adaptive_coefficient_by_hand(kl, expected):
    found = adaptive_kl_coef(0.5, kl, target=0.1, horizon=1000, num_samples=64)
    assert found == pytest.approx(expected, rel=1e-12)


def test_adaptive_coefficient_never_changes_sign():
    assert adaptive_kl_coef(0.5, 0.0, target=0.1, horizon=10, num_samples=64) == 0.0


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 10), (0.1, 0)])
def test_adaptive_coefficient_refuses_what_has_no_meaning(target, horizon):
    with pytest.raises(ValueError, match="must both be positive"):
        adaptive_kl_coef(0.5, 0.1, target=target, horizon=horizon, num_samples=1)
