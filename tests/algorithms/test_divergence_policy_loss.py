import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_steps import (
    MODES,
    NOTHING,
    assert_equals_loops,
    assert_gradcheck,
    assert_invariant_to_splits,
    packed,
    random_step,
    split_at_random,
    steps,
)

from shardwise.algorithms.divergence_policy_loss import dppo_kl, dppo_tv

THRESHOLDS = {"threshold_low": 0.1137, "threshold_high": 0.2137}
LOSSES = {
    "dppo_tv": lambda *a: dppo_tv(*a[:5], **THRESHOLDS),
    "dppo_kl": lambda *a: dppo_kl(*a[:5], **THRESHOLDS),
}


def moved_too_far_tv(p, old_p, rises):
    return p - old_p > 0.2137 if rises else p - old_p < -0.1137


def moved_too_far_kl(p, old_p, rises):
    rest, old_rest = max(1 - p, 1e-8), max(1 - old_p, 1e-8)
    log_ratio = min(max(math.log(old_p / p), -20), 20)
    divergence = old_p * log_ratio + old_rest * math.log(old_rest / rest)
    return (divergence > 0.2137 and p > old_p) if rises else (divergence > 0.1137 and p < old_p)


def loop_of(moved_too_far):
    def loop(tokens, selected):
        values = []
        for new, log_r, a, old in tokens:
            weight = min(math.exp(log_r), 20.0)
            if moved_too_far(math.exp(new), math.exp(old), a > 0):
                weight = 0.0
            values.append((-weight * a * new, -weight * a))
        return values

    return loop


LOOPS = {"dppo_tv": loop_of(moved_too_far_tv), "dppo_kl": loop_of(moved_too_far_kl)}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=100)
@given(step=steps)
def test_value_and_gradient_equal_the_formula_written_as_a_loop(name, step):
    assert_equals_loops(LOSSES[name], LOOPS[name], step)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=8)
@given(step=steps, data=st.data())
def test_trap_01_losses_are_the_same_for_every_split_order_and_packing(name, mode, step, data):
    assert_invariant_to_splits(LOSSES[name], step, split_at_random(data, step), mode)


def tokens_of(pairs, advantages):
    """One sequence; `pairs` are (probability, old probability)."""
    new, old = torch.tensor(pairs, dtype=torch.float64).log().unbind(1)
    mask, cu_seqlens = torch.ones(len(pairs), dtype=torch.bool), torch.tensor([0, len(pairs)], dtype=torch.int32)
    return new.requires_grad_(), old, torch.tensor(advantages, dtype=torch.float64), mask, cu_seqlens


def test_dppo_tv_by_hand():
    # changes +0.3 (A > 0: too far), +0.3 (A < 0: may come back), -0.2 (A < 0: too far), -0.2 (A > 0), a rare token x 8
    arrays = tokens_of([(0.6, 0.3), (0.6, 0.3), (0.5, 0.7), (0.5, 0.7), (0.008, 0.001)], [1.0, -1.0, -1.0, 1.0, 1.0])
    losses, metrics = dppo_tv(*arrays, threshold_low=0.1, threshold_high=0.2)
    losses.sum().backward()
    assert arrays[0].grad.tolist() == pytest.approx([0.0, 2.0, 0.0, -5 / 7, -8.0])
    assert metrics["policy/clip_fraction_high"].result() == pytest.approx(1 / 5)
    assert metrics["policy/clip_fraction_low"].result() == pytest.approx(1 / 5)


def test_dppo_kl_by_hand():
    # KL(1/2 || 3/4) = log(4/3) / 2 = 0.1438, KL(1/2 || 1/4) the same
    pairs, advantages = [(0.75, 0.5), (0.25, 0.5), (0.75, 0.5), (0.25, 0.5)], [1.0, -1.0, -1.0, 1.0]
    for threshold, expected in ((0.143, [0.0, 0.0, 1.5, -0.5]), (0.145, [-1.5, 0.5, 1.5, -0.5])):
        arrays = tokens_of(pairs, advantages)
        losses, metrics = dppo_kl(*arrays, threshold_low=threshold, threshold_high=threshold)
        losses.sum().backward()
        assert arrays[0].grad.tolist() == pytest.approx(expected)
        assert metrics["policy/clip_fraction_high"].result() == (0.25 if threshold < 0.144 else 0.0)
        assert metrics["policy/clip_fraction_low"].result() == (0.25 if threshold < 0.144 else 0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_weights_end_at_20(name):
    arrays = tokens_of([(0.1, 0.001)], [-1.0])
    losses, _ = LOSSES[name](*arrays)
    losses.sum().backward()
    assert arrays[0].grad.item() == 20.0


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_a_derivative_where_the_weight_is_a_constant(name):
    """Ratios above 20 that may come back, and tokens that have moved too far."""
    step = random_step(0, [4, 2])
    step = [[(new, new - 5.0, -abs(a), trained, s) for new, _, a, trained, s in sequence] for sequence in step]
    step.append([(-0.1, -1.5, 1.0, True, False)])
    assert_gradcheck(LOSSES[name], step)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_at_ratio_1_is_the_policy_gradient(name):
    logprobs, _, advantages, mask, *rest = packed(random_step(1, [3, 2]))
    losses, _ = LOSSES[name](logprobs, logprobs.detach(), advantages, mask, *rest)
    losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.where(mask, -advantages, 0.0))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_f37_certain_and_impossible_tokens_are_finite(name, dtype):
    """Probabilities of 1 and 0 on either side; float32 and the dtype stay."""
    logprobs = torch.tensor([0.0, -1e-12, -1.0, 0.0, -30.0], dtype=dtype, requires_grad=True)
    old = torch.tensor([-1.0, -math.inf, -math.inf, 0.0, 0.0], dtype=dtype)
    for sign in (1.0, -1.0):
        arrays = (old, torch.full((5,), sign, dtype=dtype), torch.ones(5, dtype=torch.bool))
        losses, metrics = LOSSES[name](logprobs, *arrays, torch.tensor([0, 5], dtype=torch.int32))
        assert losses.isfinite().all()
        assert losses.dtype == dtype
        assert metrics["policy/log_ratio_clamped"].result() == 3
        moved = metrics["policy/clip_fraction_high" if sign > 0 else "policy/clip_fraction_low"].result()
        assert moved == pytest.approx(3 / 5 if sign > 0 else 1 / 5)


@pytest.mark.parametrize("name", LOSSES)
def test_f35_what_is_not_trained_is_zero_with_a_graph(name):
    nan, inf = float("nan"), float("inf")
    logprobs = torch.tensor([nan, inf, -1.0], requires_grad=True)
    old, advantages = torch.tensor([nan, -inf, -1.0]), torch.tensor([inf, nan, 2.0])
    cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32)
    losses, metrics = LOSSES[name](logprobs, old, advantages, torch.tensor([False, False, True]), cu_seqlens)
    losses.sum().backward()
    assert losses.tolist() == [0.0, 0.0, 2.0]
    assert logprobs.grad.tolist() == [0.0, 0.0, -2.0]
    assert all(math.isfinite(value.result()) for value in metrics.values())

    logprobs = torch.tensor([nan], requires_grad=True)
    losses, metrics = LOSSES[name](logprobs, *NOTHING)
    losses.sum().backward()
    assert logprobs.grad.tolist() == [0.0]
    assert all(value.result() == 0.0 for value in metrics.values())
