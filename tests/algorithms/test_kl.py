import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.algorithms.kl import kl_divergence

logprob = st.floats(-60, 0, width=32)


def loop_kl(logprob, ref_logprob, estimator):
    x = ref_logprob - logprob
    match estimator:
        case "k1":
            return -x
        case "k2":
            return x * x / 2
        case "k3":
            x = min(max(x, -20.0), 20.0)
            return min(max(math.exp(x) - x - 1, -10.0), 10.0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(pairs=st.lists(st.tuples(logprob, logprob), min_size=1, max_size=8))
def test_estimators_equal_the_formulas_written_as_loops(estimator, pairs):
    logprobs, ref_logprobs = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    expected = [loop_kl(p, q, estimator) for p, q in pairs]
    np.testing.assert_allclose(kl_divergence(logprobs, ref_logprobs, estimator=estimator), expected, atol=1e-12)


def test_estimators_by_hand():
    logprobs, ref_logprobs = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    values = [kl_divergence(logprobs, ref_logprobs, estimator=e).item() for e in ("k1", "k2", "k3")]
    assert values == pytest.approx([math.log(2), math.log(2) ** 2 / 2, 0.5 + math.log(2) - 1])


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


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
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


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="estimator=k4 is not known; use k1, k2 or k3"):
        kl_divergence(torch.zeros(1), torch.zeros(1), estimator="k4")
