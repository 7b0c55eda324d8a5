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

from shardwise.algorithms.covariance_policy_loss import clip_cov, clip_cov_selection, kl_cov, kl_cov_selection

LOSSES = {
    "clip_cov": lambda *a: clip_cov(*a, clip_low=0.2137, clip_high=0.3137),
    "kl_cov": lambda *a: kl_cov(*a, coef=0.7),
}
SELECTIONS = {
    "clip_cov": lambda *a, fraction=0.3: clip_cov_selection(*a, fraction=fraction, cov_low=-0.5, cov_high=2.0, seed=7),
    "kl_cov": lambda *a, fraction=0.3: kl_cov_selection(*a, fraction=fraction),
}


def loop_clip_cov(tokens, selected):
    values = []
    for token, is_selected in zip(tokens, selected, strict=True):
        _, log_r, a, _ = token
        ratio = math.exp(log_r)
        loss = max(-ratio * a, -min(max(ratio, 1 - 0.2137), 1 + 0.3137) * a)
        cut = (a > 0 and ratio > 1.3137) or (a < 0 and ratio < 0.7863) or not passes(token)
        values.append((0.0, 0.0) if is_selected else (loss, 0.0 if cut else -ratio * a))
    return values


def loop_kl_cov(tokens, selected):
    values = []
    for token, is_selected in zip(tokens, selected, strict=True):
        _, log_r, a, _ = token
        penalty = 0.7 if is_selected else 0.0
        gradient = -math.exp(log_r) * a + penalty * ((log_r > 0) - (log_r < 0))
        values.append((-math.exp(log_r) * a + penalty * abs(log_r), gradient if passes(token) else 0.0))
    return values


LOOPS = {"clip_cov": loop_clip_cov, "kl_cov": loop_kl_cov}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=60)
@given(step=steps)
def test_value_and_gradient_equal_the_formula_written_as_a_loop(name, step):
    metrics = assert_equals_loops(LOSSES[name], LOOPS[name], step)
    trained = [token for sequence in step for token in sequence if token[3]]
    expected = sum(token[4] for token in trained) / max(len(trained), 1)
    assert metrics["policy/selected_fraction"].result() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=8)
@given(step=steps, data=st.data())
def test_trap_01_losses_are_the_same_for_every_split_order_and_packing(name, mode, step, data):
    assert_invariant_to_splits(LOSSES[name], step, split_at_random(data, step), mode)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_derivatives(name):
    assert_gradcheck(LOSSES[name], random_step(0, [4, 1, 3]))


def test_f37_infinite_old_logprobs_are_clamped_and_counted():
    for loss_fn in LOSSES.values():
        logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
        arrays = (torch.tensor([-math.inf, -1.0]), torch.ones(2), torch.ones(2, dtype=torch.bool))
        selected = torch.tensor([True, False])
        losses, metrics = loss_fn(logprobs, *arrays, torch.tensor([0, 2], dtype=torch.int32), selected)
        losses.sum().backward()
        assert losses.isfinite().all()
        assert logprobs.grad.isfinite().all()
        assert metrics["policy/log_ratio_clamped"].result() == 1


@pytest.mark.parametrize("name", LOSSES)
def test_f35_what_is_not_trained_is_zero_with_a_graph(name):
    nan, inf = float("nan"), float("inf")
    logprobs = torch.tensor([nan, inf, -1.0], requires_grad=True)
    arrays = (torch.tensor([nan, -inf, -1.0]), torch.tensor([inf, nan, 2.0]), torch.tensor([False, False, True]))
    selected = torch.tensor([True, False, False])
    losses, metrics = LOSSES[name](logprobs, *arrays, torch.tensor([0, 2, 3], dtype=torch.int32), selected)
    losses.sum().backward()
    assert losses.tolist() == [0.0, 0.0, -2.0]
    assert logprobs.grad.tolist() == [0.0, 0.0, -2.0]
    assert all(value.result() == 0.0 for value in metrics.values())

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


def covariances(logprobs, advantages, loss_mask):
    """[N, L] float64 by numpy, NaN where not trained."""
    mask = loss_mask.numpy()
    logprobs, advantages = (np.where(mask, a.double().numpy(), np.nan) for a in (logprobs, advantages))
    return (advantages - np.nanmean(advantages)) * (logprobs - np.nanmean(logprobs))


def random_arrays(seed, num_samples=6, width=5):
    """Samples with one advantage each, some of them the same."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.randn(num_samples, width, generator=generator).abs()
    advantages = torch.randint(-2, 3, (num_samples, 1), generator=generator) / 1.7
    return logprobs, advantages.expand(-1, width), torch.rand(num_samples, width, generator=generator) > 0.3


@pytest.mark.parametrize("seed", range(5))
def test_kl_cov_selects_the_largest_covariances(seed):
    arrays = random_arrays(seed)
    selected = kl_cov_selection(*arrays, fraction=0.2).numpy()
    values = covariances(*arrays)
    assert selected.sum() == int(0.2 * arrays[2].sum())
    assert not selected[~arrays[2].numpy()].any()
    assert values[selected].min() > np.where(arrays[2].numpy() & ~selected, values, -np.inf).max()


@pytest.mark.parametrize("seed", range(5))
def test_clip_cov_draws_within_the_range(seed):
    arrays = random_arrays(seed)
    values = covariances(*arrays)
    candidates = (values > 0.1) & (values < 2.0)
    few = clip_cov_selection(*arrays, fraction=0.1, cov_low=0.1, cov_high=2.0, seed=seed).numpy()
    assert few.sum() == min(int(0.1 * arrays[2].sum()), candidates.sum())
    assert candidates[few].all()
    everything = clip_cov_selection(*arrays, fraction=1.0, cov_low=0.1, cov_high=2.0, seed=seed).numpy()
    assert (everything == candidates).all()
    assert not clip_cov_selection(*arrays, fraction=1.0, cov_low=50.0, cov_high=51.0, seed=seed).any()


def test_selection_by_hand():
    # means 1/4 and -2: covariances 3/4 x 1, -1/4 x 1, -1/4 x 0, -1/4 x -2
    logprobs = torch.tensor([[math.nan, -1.0, -1.0], [-2.0, -4.0, math.nan]])
    advantages = torch.tensor([[math.nan, 1.0, 0.0], [0.0, 0.0, math.nan]])
    loss_mask = torch.tensor([[False, True, True], [True, True, False]])
    largest = kl_cov_selection(logprobs, advantages, loss_mask, fraction=0.5)
    assert largest.tolist() == [[False, True, False], [False, True, False]]
    drawn = clip_cov_selection(logprobs, advantages, loss_mask, fraction=1.0, cov_low=0.4, cov_high=0.6, seed=0)
    assert drawn.tolist() == [[False, False, False], [False, True, False]]
    at_least_one = kl_cov_selection(logprobs, advantages, loss_mask, fraction=1e-4)
    assert at_least_one.tolist() == [[False, True, False], [False, False, False]]


def test_clip_cov_draws_every_candidate_equally_often():
    arrays = random_arrays(0)
    draws = torch.stack(
        [clip_cov_selection(*arrays, fraction=0.3, cov_low=-0.5, cov_high=2.0, seed=seed) for seed in range(400)]
    )
    values = covariances(*arrays)
    candidates = torch.tensor((values > -0.5) & (values < 2.0))
    shares = draws.float().mean(0)[candidates]
    expected = draws[0].sum() / candidates.sum()
    assert (shares - expected).abs().max() < 5 * math.sqrt(expected * (1 - expected) / 400)


@pytest.mark.parametrize("name", SELECTIONS)
@settings(max_examples=40)
@given(seed=st.integers(0, 99), left=st.integers(0, 2), data=st.data())
def test_trap_01_selection_knows_neither_order_nor_padding(name, seed, left, data):
    arrays = random_arrays(seed)
    order = torch.tensor(data.draw(st.permutations(range(6))))
    shuffled = [torch.nn.functional.pad(array[order], (left, 1)) for array in arrays]
    expected = torch.nn.functional.pad(SELECTIONS[name](*arrays)[order], (left, 1))
    assert SELECTIONS[name](*shuffled).tolist() == expected.tolist()


def test_trap_01_tokens_that_differ_in_one_thing_alone_are_selected_in_any_order():
    # covariances 3/8, 1/8 | 5/8, 3/8: of the two that tie, the earlier one in its response
    arrays = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]]), torch.eye(2), torch.ones(2, 2, dtype=torch.bool)
    assert kl_cov_selection(*arrays, fraction=0.5).tolist() == [[True, False], [True, False]]
    flipped = [array.flip(0) for array in arrays]
    assert kl_cov_selection(*flipped, fraction=0.5).tolist() == [[True, False], [True, False]]
    # one of two candidates that share logprob and place: the draw goes by their advantages
    arrays = torch.tensor([[-1.0], [-1.0], [-4.0]]), torch.tensor([[1.0], [2.0], [0.0]]), torch.ones(3, 1).bool()
    flipped = [array.flip(0) for array in arrays]
    for seed in range(9):
        arguments = {"fraction": 0.4, "cov_low": -0.1, "cov_high": 1.1, "seed": seed}
        drawn = clip_cov_selection(*arrays, **arguments)
        assert drawn.sum() == 1
        assert clip_cov_selection(*flipped, **arguments).flip(0).tolist() == drawn.tolist()


@pytest.mark.parametrize("name", SELECTIONS)
def test_equal_tokens_are_selected_in_the_right_number(name):
    """Trap 8: without any variance every covariance is 0, and the row decides."""
    arrays = torch.full((2, 4), -1.0), torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool)
    assert SELECTIONS[name](*arrays, fraction=0.5).sum() == 4


@pytest.mark.parametrize("name", SELECTIONS)
def test_nothing_trained_selects_nothing(name):
    assert not SELECTIONS[name](torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)).any()
