import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.algorithms.preference_loss import bradley_terry, dpo, ipo, kto, orpo, simpo
from shardwise.types import merge_metrics

LOSSES = {
    "dpo": lambda *a: dpo(*a, beta=0.3, label_smoothing=0.1),
    "ipo": lambda *a: ipo(*a, beta=0.3),
    "simpo": lambda *a: simpo(*a, beta=2.0, gamma=0.7),
    "orpo": lambda *a: orpo(*a, beta=0.4),
}

logprob = st.floats(-40, -0.01)
pair = st.tuples(logprob, logprob, logprob, logprob, st.integers(1, 9), st.integers(1, 9))
pairs = st.lists(pair, min_size=0, max_size=6)


def tensors(pairs):
    rows = torch.tensor(pairs, dtype=torch.float64).view(-1, 6)
    return rows[:, :2].clone().requires_grad_(), rows[:, 2:4], rows[:, 4:].long()


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def loop_loss(name, chosen, rejected, ref_chosen, ref_rejected, chosen_length, rejected_length):
    """Loss, and the rewards of the two completions."""
    c, r = chosen / chosen_length, rejected / rejected_length
    match name:
        case "dpo":
            h = 0.3 * (chosen - ref_chosen - rejected + ref_rejected)
            loss = -0.9 * log_sigmoid(h) - 0.1 * log_sigmoid(-h)
            return loss, 0.3 * (chosen - ref_chosen), 0.3 * (rejected - ref_rejected)
        case "ipo":
            c, r = c - ref_chosen / chosen_length, r - ref_rejected / rejected_length
            return (c - r - 1 / 0.6) ** 2, 0.3 * c, 0.3 * r
        case "simpo":
            return -log_sigmoid(2 * c - 2 * r - 0.7), 2 * c, 2 * r
        case "orpo":
            odds = [x - math.log(1 - math.exp(x)) for x in (c, r)]
            return -c - 0.4 * log_sigmoid(odds[0] - odds[1]), 0.4 * c, 0.4 * r


def results(metrics):
    return {name: value.result() for name, value in metrics.items()}


def pair_results(rewards):
    count = max(len(rewards), 1)
    return {
        "preference/margin": sum(c - r for c, r in rewards) / count,
        "preference/accuracy": sum(c > r for c, r in rewards) / count,
        "preference/chosen_reward": sum(c for c, _ in rewards) / count,
        "preference/rejected_reward": sum(r for _, r in rewards) / count,
    }


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=60)
@given(pairs=pairs, cut=st.integers(0, 6))
def test_losses_and_metrics_equal_the_loop_for_every_split(name, pairs, cut):
    expected = [loop_loss(name, *pair) for pair in pairs]
    parts = [LOSSES[name](*tensors(part)) for part in (pairs[:cut], pairs[cut:])]
    losses = [loss for part, _ in parts for loss in part.tolist()]
    assert losses == pytest.approx([loss for loss, _, _ in expected], rel=1e-9, abs=1e-12)
    rewards = [(chosen, rejected) for _, chosen, rejected in expected]
    metrics = results(merge_metrics(metrics for _, metrics in parts))
    accuracy = metrics.pop("preference/accuracy")
    if all(abs(c - r) > 1e-9 for c, r in rewards):
        assert accuracy == pytest.approx(pair_results(rewards)["preference/accuracy"])
    assert metrics == pytest.approx({n: pair_results(rewards)[n] for n in metrics}, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_derivatives(name):
    sums, *rest = tensors([(-3.0, -2.0, -2.5, -2.25, 3, 5), (-1.0, -7.0, -1.5, -5.0, 2, 4), (-9.0, -0.5, -1, -1, 6, 1)])
    assert torch.autograd.gradcheck(lambda s: LOSSES[name](s, *rest)[0], sums)


def test_dpo_by_hand():
    # at the reference the loss is log 2 and the gradient -+ beta / 2
    sums = torch.tensor([[-3.0, -4.0]], requires_grad=True)
    losses, metrics = dpo(sums, sums.detach(), torch.ones(1, 2), beta=0.1, label_smoothing=0.0)
    losses.sum().backward()
    assert losses.item() == pytest.approx(math.log(2))
    assert sums.grad.tolist() == [pytest.approx([-0.05, 0.05])]
    assert results(metrics)["preference/accuracy"] == 0.0  # a tie is not right
    # h = log 3 / beta: sigmoid 3/4
    sums = torch.tensor([[-1.0 + 10 * math.log(3), -1.0]])
    ref_sums = torch.full((1, 2), -1.0)
    losses, metrics = dpo(sums, ref_sums, torch.ones(1, 2), beta=0.1, label_smoothing=0.0)
    assert losses.item() == pytest.approx(math.log(4 / 3))
    assert results(metrics) == pytest.approx(pair_results([(math.log(3), 0.0)]))
    losses, _ = dpo(sums, ref_sums, torch.ones(1, 2), beta=0.1, label_smoothing=0.25)
    assert losses.item() == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))


def test_ipo_is_zero_at_its_target_and_averages_over_tokens():
    # per token: (-1) - (-2) = 1 more than the reference, and 1 / (2 x 0.5) = 1
    sums, ref_sums = torch.tensor([[-2.0, -8.0]]), torch.tensor([[-2.0, -4.0]])
    losses, metrics = ipo(sums, ref_sums, torch.tensor([[2, 4]]), beta=0.5)
    assert losses.item() == 0.0
    assert results(metrics)["preference/margin"] == 0.5


def test_simpo_by_hand():
    # 2 x (-1 - (-2)) - 2 = 0
    losses, _ = simpo(torch.tensor([[-2.0, -8.0]]), torch.zeros(1, 2), torch.tensor([[2, 4]]), beta=2.0, gamma=2.0)
    assert losses.item() == pytest.approx(math.log(2))


def test_orpo_by_hand():
    # probabilities per token 1/2 and 1/4: odds 1 and 1/3, so sigmoid(log 3) = 3/4
    sums = torch.tensor([[2 * math.log(0.5), 3 * math.log(0.25)]])
    losses, _ = orpo(sums, torch.zeros(1, 2), torch.tensor([[2, 3]]), beta=0.5)
    assert losses.item() == pytest.approx(math.log(2) + 0.5 * math.log(4 / 3))


@pytest.mark.parametrize("name", LOSSES)
def test_trap_08_a_completion_without_trained_tokens_is_finite(name):
    sums = torch.tensor([[0.0, -3.0], [-3.0, 0.0], [0.0, 0.0]], requires_grad=True)
    losses, metrics = LOSSES[name](sums, torch.zeros(3, 2), torch.tensor([[0, 3], [3, 0], [0, 0]]))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert sums.grad.isfinite().all()
    assert all(math.isfinite(value) for value in results(metrics).values())


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_logprobs_are_finite_in_float32(name):
    sums = torch.tensor([[-1e-9, -5e4], [-5e4, -1e-9]], requires_grad=True)
    losses, _ = LOSSES[name](sums, torch.full((2, 2), -100.0), torch.tensor([[10, 10], [10, 10]]))
    losses.sum().backward()
    assert losses.dtype == torch.float32
    assert losses.isfinite().all()
    assert sums.grad.isfinite().all()


@pytest.mark.parametrize("name", [*LOSSES, "kto", "bradley_terry"])
def test_no_pairs_are_no_losses_with_a_graph(name):
    sums = torch.zeros((0,) if name == "kto" else (0, 2), requires_grad=True)
    nothing = torch.zeros_like(sums)
    match name:
        case "kto":
            weights = {"desirable_weight": 1.0, "undesirable_weight": 1.0}
            losses, metrics = kto(sums, nothing, nothing.bool(), 0.0, beta=0.1, **weights)
        case "bradley_terry":
            losses, metrics = bradley_terry(sums, torch.zeros(0), center_coef=0.01)
        case _:
            losses, metrics = LOSSES[name](sums, nothing, nothing.long())
    assert losses.shape == (0,)
    losses.sum().backward()
    assert sums.grad.shape == sums.shape
    assert set(results(metrics).values()) == {0.0}


def kto_of(sums, ref_sums, desirable, kl=0.5):
    return kto(sums, ref_sums, desirable, kl, beta=0.3, desirable_weight=1.25, undesirable_weight=0.75)


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(logprob, logprob, st.booleans()), max_size=6), cut=st.integers(0, 6), kl=st.floats(-1, 5)
)
def test_kto_equals_the_loop_for_every_split(rows, cut, kl):
    def part_of(rows):
        sums, ref_sums = torch.tensor([row[:2] for row in rows], dtype=torch.float64).view(-1, 2).unbind(1)
        return kto_of(sums, ref_sums, torch.tensor([row[2] for row in rows], dtype=torch.bool), kl)

    expected, rewards, margins = [], {True: [], False: []}, []
    for new, ref, desirable in rows:
        margin = 0.3 * (new - ref - max(kl, 0)) * (1 if desirable else -1)
        expected.append((1.25 if desirable else 0.75) * (1 - 1 / (1 + math.exp(-margin))))
        rewards[desirable].append(0.3 * (new - ref))
        margins.append(margin)
    parts = [part_of(part) for part in (rows[:cut], rows[cut:])]
    assert [loss for part, _ in parts for loss in part.tolist()] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    metrics = results(merge_metrics(metrics for _, metrics in parts))
    assert metrics["preference/chosen_reward"] == pytest.approx(np.mean(rewards[True] or [0.0]), abs=1e-9)
    assert metrics["preference/rejected_reward"] == pytest.approx(np.mean(rewards[False] or [0.0]), abs=1e-9)
    if all(abs(margin) > 1e-9 for margin in margins):  # where they are 0, rounding decides
        right = sum(margin > 0 for margin in margins)
        assert metrics["preference/accuracy"] == pytest.approx(right / max(len(rows), 1))


def test_kto_by_hand():
    # h - kl = log 3 / beta: 1 - 3/4 for a desirable completion, 3/4 for another
    sums = torch.full((2,), 1.0 + math.log(3) / 0.3)
    losses, _ = kto_of(sums, torch.zeros(2), torch.tensor([True, False]), kl=1.0)
    assert losses.tolist() == pytest.approx([1.25 / 4, 0.75 * 3 / 4])


def test_kto_gradient():
    sums = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    ref_sums, desirable = torch.tensor([-2.0, -2.0, -2.0], dtype=torch.float64), torch.tensor([True, False, True])
    assert torch.autograd.gradcheck(lambda s: kto_of(s, ref_sums, desirable)[0], sums)


def test_bradley_terry_by_hand():
    # lead log 3 over a margin of 0, 1 and log 3 under one of log 3
    scores = torch.tensor([[math.log(3), 0.0], [math.log(3), 0.0], [0.0, 1.0]])
    margins = torch.tensor([0.0, math.log(3), 0.0])
    losses, metrics = bradley_terry(scores, margins, center_coef=0.0)
    assert losses.tolist() == pytest.approx([math.log(4 / 3), math.log(2), math.log(1 + math.e)])
    assert results(metrics) == pytest.approx(pair_results(scores.tolist()))
    centered, _ = bradley_terry(scores, margins, center_coef=0.5)
    assert (centered - losses).tolist() == pytest.approx([math.log(3) ** 2 / 2, math.log(3) ** 2 / 2, 0.5])


def test_bradley_terry_gradient():
    torch.manual_seed(0)
    scores, margins = torch.randn(4, 2, dtype=torch.float64, requires_grad=True), torch.rand(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s: bradley_terry(s, margins, center_coef=0.1)[0], scores)


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_carry_no_graph(name):
    _, metrics = LOSSES[name](*tensors([(-3.0, -2.0, -2.5, -2.25, 3, 5)]))
    assert not any(torch.is_tensor(v.total) and v.total.requires_grad for v in metrics.values())
