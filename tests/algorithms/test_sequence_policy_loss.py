import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_steps import (
    MODES,
    NOTHING,
    assert_equals_loops,
    assert_gradcheck_of_sequences,
    assert_invariant_to_splits,
    packed,
    passes,
    random_step,
    split_at_random,
    steps,
)

from shardwise.algorithms.sequence_policy_loss import gmpo, gspo, kimi, topr

LOSSES = {
    "gspo": lambda *a: gspo(*a[:5], clip_low=0.1137, clip_high=0.2137),
    "gmpo": lambda *a: gmpo(*a[:5], clip_low=0.3137, clip_high=0.4137),
    "topr": lambda *a: topr(*a[:5], ratio_cap=1.0137),
    "kimi": lambda *a: kimi(*a[:5], tau=0.3),
}


def mean(values):
    return sum(values) / len(values)


def loop_gspo(tokens, selected):
    s = math.exp(mean([log_r for _, log_r, _, _ in tokens]))
    clipped = min(max(s, 1 - 0.1137), 1 + 0.2137)
    cuts = [(a > 0 and s > 1.2137) or (a < 0 and s < 0.8863) for _, _, a, _ in tokens]
    return [
        (max(-s * token[2], -clipped * token[2]), 0.0 if cut or not passes(token) else -s * token[2])
        for token, cut in zip(tokens, cuts, strict=True)
    ]


def loop_gmpo(tokens, selected):
    clipped = [min(log_r, 0.4137) if a > 0 else max(log_r, -0.3137) for _, log_r, a, _ in tokens]
    geometric_mean = math.prod(math.exp(c) ** (1 / len(tokens)) for c in clipped)
    return [
        (-t[2] * geometric_mean, -t[2] * geometric_mean if c == t[1] and passes(t) else 0.0)
        for c, t in zip(clipped, tokens, strict=True)
    ]


def loop_topr(tokens, selected):
    ratio = math.exp(min(max(sum(log_r for _, log_r, _, _ in tokens), -20.0), 20.0))
    weights = [min(ratio, 1.0137) if a < 0 else 1.0 for _, _, a, _ in tokens]
    return [(-w * a * new, -w * a) for w, (new, _, a, _) in zip(weights, tokens, strict=True)]


def loop_kimi(tokens, selected):
    total = sum(log_r for _, log_r, _, _ in tokens)
    return [((-t[2] + 0.3 / 2 * total) * t[1], (-t[2] + 0.3 * total) if passes(t) else 0.0) for t in tokens]


LOOPS = {"gspo": loop_gspo, "gmpo": loop_gmpo, "topr": loop_topr, "kimi": loop_kimi}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=60)
@given(step=steps)
def test_value_and_gradient_equal_the_formula_written_as_a_loop(name, step):
    assert_equals_loops(LOSSES[name], LOOPS[name], step)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=8)
@given(step=steps, data=st.data())
def test_trap_01_losses_are_the_same_for_every_split_order_and_packing(name, mode, step, data):
    assert_invariant_to_splits(LOSSES[name], step, split_at_random(data, step), mode)


@pytest.mark.parametrize("name", LOSSES)
def test_trap_01_geometric_means_do_not_know_their_micro_batch(name):
    """Elsewhere one of these losses is .160, .321 and .642 for one, two and four micro-batches."""
    step = random_step(3, [5, 2, 4, 1])
    for split in ([[0, 1], [2, 3]], [[3], [2], [1], [0]]):
        assert_invariant_to_splits(LOSSES[name], step, split, "seq-mean-token-mean")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gspo", "gmpo", "kimi"])
def test_gradient_of_a_step_is_its_derivative(name, mode):
    """Where the tokens of a sequence share one advantage, in every aggregation."""
    assert_gradcheck_of_sequences(LOSSES[name], random_step(4, [4, 1, 3, 2], one_advantage=True), mode)


def test_gradient_of_topr_is_its_derivative_where_the_weight_is_a_constant():
    step = random_step(4, [4, 1, 3, 2], one_advantage=True)
    assert_gradcheck_of_sequences(lambda *a: topr(*a[:5], ratio_cap=1e-3), step, "token-mean")


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_at_ratio_1_is_the_policy_gradient(name):
    logprobs, _, advantages, mask, *rest = packed(random_step(1, [3, 2]))
    losses, _ = LOSSES[name](logprobs, logprobs.detach(), advantages, mask, *rest)
    losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.where(mask, -advantages, 0.0))


@pytest.mark.parametrize("name", LOSSES)
def test_f37_infinite_old_logprobs_are_clamped_and_counted(name):
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old, advantages = torch.tensor([-math.inf, -1.0, -1.0]), torch.tensor([1.0, 1.0, -1.0])
    cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32)
    losses, metrics = LOSSES[name](logprobs, old, advantages, torch.ones(3, dtype=torch.bool), cu_seqlens)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[2] == 1.0
    assert metrics["policy/log_ratio_clamped"].result() == 1


@pytest.mark.parametrize("name", LOSSES)
def test_f35_what_is_not_trained_is_zero_with_a_graph(name):
    """Trap 8: sequences without a trained token, or with masked rubbish; and nothing at all."""
    nan, inf = float("nan"), float("inf")
    logprobs = torch.tensor([nan, inf, -1.0, nan], requires_grad=True)
    old, advantages = torch.tensor([nan, -inf, -1.0, nan]), torch.tensor([inf, nan, 2.0, nan])
    cu_seqlens = torch.tensor([0, 2, 4], dtype=torch.int32)
    mask = torch.tensor([False, False, True, False])
    losses, metrics = LOSSES[name](logprobs, old, advantages, mask, cu_seqlens)
    losses.sum().backward()
    assert losses[~mask].tolist() == [0.0, 0.0, 0.0]
    assert losses[2].isfinite()
    assert logprobs.grad.tolist() == [0.0, 0.0, -2.0, 0.0]
    assert all(math.isfinite(value.result()) for value in metrics.values())

    logprobs = torch.tensor([nan], requires_grad=True)
    losses, metrics = LOSSES[name](logprobs, *NOTHING)
    losses.sum().backward()
    assert logprobs.grad.tolist() == [0.0]
    assert all(value.result() == 0.0 for value in metrics.values())


@pytest.mark.parametrize("name", LOSSES)
def test_float32_stays_float32(name):
    logprobs, old, advantages, *rest = packed(random_step(2, [3, 2]))
    losses, _ = LOSSES[name](logprobs.float(), old.float(), advantages.float(), *rest)
    assert losses.dtype == torch.float32


def two_tokens(ratios, advantage):
    """One sequence of two trained tokens, and a masked one between them."""
    logprobs = torch.tensor([0.1 * ratios[0], 1.0, 0.1 * ratios[1]]).log().requires_grad_()
    mask, cu_seqlens = torch.tensor([True, False, True]), torch.tensor([0, 3], dtype=torch.int32)
    return logprobs, torch.tensor([0.1, 0.01, 0.1]).log(), torch.full((3,), advantage), mask, cu_seqlens


def test_gspo_by_hand():
    # ratios 4 and 1: geometric mean 2; the sequence is cut as a whole for A = 1, and free for A = -1
    losses, metrics = gspo(*(arrays := two_tokens([4.0, 1.0], 1.0)), clip_low=0.2, clip_high=0.5)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-1.5, 0.0, -1.5])
    assert arrays[0].grad.tolist() == [0.0, 0.0, 0.0]
    assert metrics["policy/clip_fraction_high"].result() == 1.0
    losses, metrics = gspo(*(arrays := two_tokens([4.0, 1.0], -1.0)), clip_low=0.2, clip_high=0.5)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([2.0, 0.0, 2.0])
    assert arrays[0].grad.tolist() == pytest.approx([2.0, 0.0, 2.0])
    assert metrics["policy/clip_fraction_high"].result() == 0.0


def test_gmpo_by_hand():
    # log ratios log 4 and 0, the first clipped to log 2: geometric mean sqrt 2, no gradient on the first
    losses, metrics = gmpo(*(arrays := two_tokens([4.0, 1.0], 1.0)), clip_low=0.4, clip_high=math.log(2))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-math.sqrt(2), 0.0, -math.sqrt(2)])
    assert arrays[0].grad.tolist() == pytest.approx([0.0, 0.0, -math.sqrt(2)])
    assert metrics["policy/clip_fraction_high"].result() == 0.5
    # for A = -1 the upper clip is off: geometric mean 2
    losses, _ = gmpo(*two_tokens([4.0, 1.0], -1.0), clip_low=0.4, clip_high=math.log(2))
    assert losses.tolist() == pytest.approx([2.0, 0.0, 2.0])
    # ratios 1/4 and 1 with A = -1, clipped to 1/2: sqrt(1/2)
    losses, metrics = gmpo(*two_tokens([0.25, 1.0], -1.0), clip_low=math.log(2), clip_high=0.4)
    assert losses.tolist() == pytest.approx([math.sqrt(0.5), 0.0, math.sqrt(0.5)])
    assert metrics["policy/clip_fraction_low"].result() == 0.5


def test_topr_by_hand():
    # the sequence's ratio is 1/2 x 1/2: a bad sample weighs 1/4, a good one 1; a ratio of 4 is capped
    for ratios, advantage, weight in (([0.5, 0.5], -1.0, 0.25), ([0.5, 0.5], 1.0, 1.0), ([2.0, 2.0], -1.0, 1.0)):
        arrays = two_tokens(ratios, advantage)
        losses, metrics = topr(*arrays, ratio_cap=1.0)
        losses.sum().backward()
        assert arrays[0].grad.tolist() == pytest.approx([-weight * advantage, 0.0, -weight * advantage])
        assert metrics["policy/clip_fraction_high"].result() == (ratios[0] > 1)


def test_kimi_is_the_squared_loss_without_its_constant():
    """(A - tau q)^2 / (2 tau) - A^2 / (2 tau) for q = log 4 + log 2, A = 3, tau = 1/2."""
    arrays = two_tokens([4.0, 2.0], 3.0)
    losses, _ = kimi(*arrays, tau=0.5)
    losses.sum().backward()
    q = math.log(8)
    assert losses.sum().item() == pytest.approx((3 - q / 2) ** 2 - 9, rel=1e-5)
    assert arrays[0].grad.tolist() == pytest.approx([-3 + q / 2, 0.0, -3 + q / 2], rel=1e-5)
