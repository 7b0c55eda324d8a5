import math

import numpy as np
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
    passes,
    random_step,
    split_at_random,
    steps,
)

from shardwise.algorithms.policy_loss import cispo, ppo_clip, reinforce, sapo
from shardwise.types import merge_metrics

LOSSES = {
    "ppo_clip": lambda *a: ppo_clip(*a[:5], clip_low=0.2137, clip_high=0.3137, dual_clip=3.137),
    "cispo": lambda *a: cispo(*a[:5], clip_low=0.2137, clip_high=0.3137),
    "sapo": lambda *a: sapo(*a[:5], tau_positive=1.0, tau_negative=1.25),
    "reinforce": lambda *a: reinforce(*a[:5]),
}
CLIP = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}


def loop_ppo(logprobs, old_logprobs, advantages, loss_mask, *, clip_low, clip_high, dual_clip):
    """Loss and metrics token by token, from the formulas in float64."""
    losses, num_tokens = [], max(sum(loss_mask), 1)
    low = high = dual = clamped = kl = 0.0
    for new, old, advantage, trained in zip(logprobs, old_logprobs, advantages, loss_mask, strict=True):
        if not trained:
            losses.append(0.0)
            continue
        log_ratio = min(max(new - old, -20.0), 20.0)
        ratio = math.exp(log_ratio)
        loss = max(-ratio * advantage, -min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage)
        if advantage < 0 and dual_clip is not None:
            dual += ratio > dual_clip
            loss = min(loss, -dual_clip * advantage)
        losses.append(loss)
        low += advantage < 0 and ratio < 1 - clip_low
        high += advantage > 0 and ratio > 1 + clip_high
        clamped += abs(new - old) > 20
        kl += min(ratio - log_ratio - 1, 10.0)
    return losses, {
        "policy/clip_fraction_low": low / num_tokens,
        "policy/clip_fraction_high": high / num_tokens,
        "policy/dual_clip_fraction": dual / num_tokens,
        "policy/log_ratio_clamped": clamped,
        "policy/approx_kl": kl / num_tokens,
    }


def one_sequence(num_tokens):
    return torch.tensor([0, num_tokens], dtype=torch.int32)


def tensors(rows):
    *arrays, mask = zip(*rows, strict=True)
    return [*(torch.tensor(a, dtype=torch.float64) for a in arrays), torch.tensor(mask), one_sequence(len(rows))]


rows = st.lists(
    st.tuples(st.floats(-40, 0), st.floats(-40, 0), st.floats(-5, 5), st.booleans()), min_size=1, max_size=10
)
near_rows = st.lists(st.tuples(st.floats(-3, 0), st.just(-1.5), st.floats(-5, 5), st.just(True)), min_size=1)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@settings(deadline=None)
@given(rows=rows | near_rows)
def test_ppo_clip_equals_the_formula_written_as_a_loop(dual_clip, rows):
    losses, metrics = ppo_clip(*tensors(rows), **{**CLIP, "dual_clip": dual_clip})
    expected, expected_metrics = loop_ppo(*zip(*rows, strict=True), **{**CLIP, "dual_clip": dual_clip})
    np.testing.assert_allclose(losses, expected, rtol=1e-9, atol=1e-12)
    assert {name: value.result() for name, value in metrics.items()} == pytest.approx(expected_metrics, abs=1e-12)


def test_ppo_clip_by_hand():
    # ratio 2 with A = 1 is clipped to 1.3; ratio 1/2 with A = -1 to 0.8; ratio 4 with A = -1 to the dual bound 3
    logprobs, old = torch.tensor([0.5, 0.25, 0.8]).log(), torch.tensor([0.25, 0.5, 0.2]).log()
    losses, metrics = ppo_clip(
        logprobs, old, torch.tensor([1.0, -1.0, -1.0]), torch.ones(3, dtype=torch.bool), one_sequence(3), **CLIP
    )
    torch.testing.assert_close(losses, torch.tensor([-1.3, 0.8, 3.0]))
    for name in ("clip_fraction_low", "clip_fraction_high", "dual_clip_fraction"):
        assert metrics[f"policy/{name}"].result() == pytest.approx(1 / 3)


def test_on_policy_gradient_is_the_policy_gradient():
    """At ratio 1 the gradient with respect to logprobs is -A."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([0.5, -2.0, 3.0])
    losses, _ = ppo_clip(
        logprobs, logprobs.detach(), advantages, torch.tensor([True, True, False]), one_sequence(3), **CLIP
    )
    losses.sum().backward()
    assert logprobs.grad.tolist() == [-0.5, 2.0, 0.0]


@given(rows=near_rows)
def test_clip_bounds_the_loss_and_cuts_the_gradient(rows):
    logprobs, old_logprobs, advantages, loss_mask, cu_seqlens = tensors(rows)
    logprobs.requires_grad_()
    losses, _ = ppo_clip(logprobs, old_logprobs, advantages, loss_mask, cu_seqlens, **CLIP)
    losses.sum().backward()
    ratio, size = (logprobs - old_logprobs).detach().exp(), advantages.abs()
    negative = advantages < 0
    assert (losses[~negative] >= -1.3 * size[~negative] - 1e-12).all()
    assert (losses[negative] >= 0.8 * size[negative] - 1e-12).all()
    assert (losses[negative] <= 3 * size[negative] + 1e-12).all()
    cut = (negative & ((ratio < 0.8) | (ratio > 3))) | (~negative & (ratio > 1.3))
    assert not logprobs.grad[cut].any()
    free = ~cut & (ratio != 0.8) & (ratio != 1.3) & (ratio != 3)
    torch.testing.assert_close(logprobs.grad[free], -(advantages * ratio)[free])


def test_gradient():
    torch.manual_seed(0)
    old_logprobs, advantages = -torch.rand(20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    logprobs = (old_logprobs + torch.randn(20, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(20) > 0.2
    assert torch.autograd.gradcheck(
        lambda p: ppo_clip(p, old_logprobs, advantages, mask, one_sequence(20), **CLIP)[0], logprobs
    )


def test_untrained_tokens_never_reach_loss_gradient_or_metrics():
    rubbish = [float("nan"), float("inf"), -float("inf")]
    logprobs = torch.tensor([-1.0, *rubbish], requires_grad=True)
    mask = torch.tensor([True, False, False, False])
    losses, metrics = ppo_clip(
        logprobs, torch.tensor([-1.0, *rubbish]), torch.tensor([2.0, *rubbish]), mask, one_sequence(4), **CLIP
    )
    losses.sum().backward()
    assert losses.tolist() == [-2.0, 0.0, 0.0, 0.0]
    assert logprobs.grad.tolist() == [-2.0, 0.0, 0.0, 0.0]
    assert all(value.result() == 0.0 for value in metrics.values())


def test_nothing_trained_is_zero_with_a_graph():
    logprobs = torch.zeros(1, requires_grad=True)
    losses, metrics = ppo_clip(logprobs, torch.zeros(1), torch.zeros(1), torch.tensor([False]), one_sequence(1), **CLIP)
    losses.sum().backward()
    assert logprobs.grad.tolist() == [0.0]
    assert all(value.result() == 0.0 for value in metrics.values())


def test_log_ratio_is_clamped_and_counted():
    logprobs = torch.tensor([0.0, -50.0, -1.0], requires_grad=True)
    old = torch.tensor([-50.0, 0.0, -1.0])
    losses, metrics = ppo_clip(
        logprobs,
        old,
        torch.tensor([-1.0, 1.0, 1.0]),
        torch.ones(3, dtype=torch.bool),
        one_sequence(3),
        **{**CLIP, "dual_clip": None},
    )
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([math.exp(20), -math.exp(-20), -1.0])
    assert logprobs.grad.tolist() == [0.0, 0.0, -1.0]
    assert metrics["policy/log_ratio_clamped"].result() == 2


@given(rows=rows, cut=st.integers(0, 10))
def test_metrics_are_the_same_for_every_micro_batch_split(rows, cut):
    parts = [part for part in (rows[:cut], rows[cut:]) if part]
    merged = merge_metrics([ppo_clip(*tensors(part), **CLIP)[1] for part in parts])
    whole = ppo_clip(*tensors(rows), **CLIP)[1]
    assert {n: v.result() for n, v in merged.items()} == pytest.approx({n: v.result() for n, v in whole.items()})


def test_metrics_carry_no_graph():
    _, metrics = ppo_clip(
        torch.zeros(2, requires_grad=True),
        torch.zeros(2),
        torch.ones(2),
        torch.ones(2, dtype=torch.bool),
        one_sequence(2),
        **CLIP,
    )
    assert not any(value.total.requires_grad for value in metrics.values())


def loop_cispo(tokens, selected):
    weights = [min(max(math.exp(log_r), 1 - 0.2137), 1 + 0.3137) for _, log_r, _, _ in tokens]
    return [(-w * a * new, -w * a) for w, (new, _, a, _) in zip(weights, tokens, strict=True)]


def loop_sapo(tokens, selected):
    values = []
    for token in tokens:
        _, log_r, a, _ = token
        tau, ratio = 1.0 if a > 0 else 1.25, math.exp(log_r)
        gate = 1 / (1 + math.exp(-min(tau * (ratio - 1), 700)))
        slope = 4 * gate * (1 - gate) * ratio if passes(token) else 0.0
        values.append((-4 / tau * gate * a, -slope * a))
    return values


def loop_reinforce(tokens, selected):
    return [(-a * new, -a) for new, _, a, _ in tokens]


LOOPS = {"cispo": loop_cispo, "sapo": loop_sapo, "reinforce": loop_reinforce}


@pytest.mark.parametrize("name", LOOPS)
@settings(max_examples=60)
@given(step=steps)
def test_value_and_gradient_equal_the_formula_written_as_a_loop(name, step):
    metrics = assert_equals_loops(LOSSES[name], LOOPS[name], step)
    if name == "cispo":
        ratios = [math.exp(min(max(t[0] - t[1], -20), 20)) for sequence in step for t in sequence if t[3]]
        count = max(len(ratios), 1)
        assert metrics["policy/clip_fraction_low"].result() == pytest.approx(sum(r < 0.7863 for r in ratios) / count)
        assert metrics["policy/clip_fraction_high"].result() == pytest.approx(sum(r > 1.3137 for r in ratios) / count)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=8)
@given(step=steps, data=st.data())
def test_trap_01_losses_are_the_same_for_every_split_order_and_packing(name, mode, step, data):
    assert_invariant_to_splits(LOSSES[name], step, split_at_random(data, step), mode)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_derivatives(name):
    step = random_step(0, [4, 1, 3])
    if name == "cispo":  # its weight is a constant where everything is clipped to 1
        assert_gradcheck(lambda *a: cispo(*a[:5], clip_low=0.0, clip_high=0.0), step)
    else:
        assert_gradcheck(LOSSES[name], step)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_at_ratio_1_is_the_policy_gradient(name):
    logprobs, _, advantages, mask, *rest = packed(random_step(1, [3, 2]))
    losses, _ = LOSSES[name](logprobs, logprobs.detach(), advantages, mask, *rest)
    losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.where(mask, -advantages, 0.0))


@pytest.mark.parametrize("name", LOSSES)
def test_f37_infinite_old_logprobs_are_clamped_and_counted(name):
    old = torch.tensor([-math.inf, -1.0])
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    losses, metrics = LOSSES[name](logprobs, old, torch.ones(2), torch.ones(2, dtype=torch.bool), one_sequence(2))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logprobs.grad.isfinite().all()
    assert metrics["policy/log_ratio_clamped"].result() == 1


@pytest.mark.parametrize("name", LOSSES)
def test_f35_what_is_not_trained_is_zero_with_a_graph(name):
    """Trap 8: a sequence without a trained token, full of rubbish, beside one that has one; and nothing at all."""
    nan, inf = float("nan"), float("inf")
    logprobs = torch.tensor([nan, inf, -1.0], requires_grad=True)
    old, advantages = torch.tensor([nan, -inf, -1.0]), torch.tensor([inf, nan, 2.0])
    cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32)
    losses, metrics = LOSSES[name](logprobs, old, advantages, torch.tensor([False, False, True]), cu_seqlens)
    losses.sum().backward()
    assert losses[:2].tolist() == [0.0, 0.0]
    assert losses[2].isfinite()
    assert logprobs.grad.tolist() == [0.0, 0.0, -2.0]
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


def test_cispo_by_hand():
    # ratio 2 weighs 1.3, ratio 1/2 weighs 0.8, and both keep their gradient
    logprobs = torch.tensor([0.5, 0.25]).log().requires_grad_()
    old, advantages = torch.tensor([0.25, 0.5]).log(), torch.tensor([1.0, -1.0])
    arguments = (old, advantages, torch.ones(2, dtype=torch.bool), one_sequence(2))
    losses, _ = cispo(logprobs, *arguments, clip_low=0.2, clip_high=0.3)
    losses.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.3, 0.8])
    assert losses.tolist() == pytest.approx([1.3 * math.log(2), -0.8 * math.log(4)])


def test_sapo_by_hand():
    # ratio 3: 4 sigmoid(2) for A = 1 and tau 1; 2 sigmoid(4) for A = -1 and tau 2
    logprobs, old = torch.tensor([0.75, 0.75]).log(), torch.tensor([0.25, 0.25]).log()
    arguments = (logprobs, old, torch.tensor([1.0, -1.0]), torch.ones(2, dtype=torch.bool), one_sequence(2))
    losses, _ = sapo(*arguments, tau_positive=1.0, tau_negative=2.0)
    assert losses.tolist() == pytest.approx([-4 / (1 + math.exp(-2)), 2 / (1 + math.exp(-4))])
