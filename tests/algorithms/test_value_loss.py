import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.algorithms.masked import aggregate
from shardwise.algorithms.value_loss import clipped_value_loss, explained_variance
from shardwise.types import Denominators, merge_metrics

number = st.floats(-5, 5)
rows = st.lists(st.tuples(number, number, number, st.booleans()), min_size=1, max_size=10)


def tensors(rows):
    *arrays, mask = zip(*rows, strict=True)
    values, old_values, returns = (torch.tensor(a, dtype=torch.float64) for a in arrays)
    return values.requires_grad_(), old_values, returns, torch.tensor(mask)


def loop_value_loss(value, old, target, clip):
    """Loss, gradient, and whether the clip cuts the gradient."""
    free = (value - target) ** 2
    held = value if clip is None else min(max(value, old - clip), old + clip)
    if (held - target) ** 2 > free:
        return (held - target) ** 2 / 2, 0.0, True
    return free / 2, value - target, False


@pytest.mark.parametrize("clip", [None, 0.5])
@given(rows=rows)
def test_loss_and_gradient_equal_the_formula_written_as_a_loop(clip, rows):
    arrays = tensors(rows)
    losses, metrics = clipped_value_loss(*arrays, clip=clip)
    losses.sum().backward()
    trained = [row[:3] for row in rows if row[3]]
    for i, (*row, is_trained) in enumerate(rows):
        loss, gradient, _ = loop_value_loss(*row, clip) if is_trained else (0.0, 0.0, False)
        assert losses[i].item() == pytest.approx(loss, abs=1e-12)
        held = row[0] if clip is None else min(max(row[0], row[1] - clip), row[1] + clip)
        if abs(abs(held - row[2]) - abs(row[0] - row[2])) > 1e-9 or held == row[0]:  # elsewhere two branches are equal
            assert arrays[0].grad[i].item() == pytest.approx(gradient, abs=1e-12)
    count = max(len(trained), 1)
    assert {name: value.result() for name, value in metrics.items()} == pytest.approx(
        {
            "critic/value": sum(v for v, _, _ in trained) / count,
            "critic/return": sum(r for _, _, r in trained) / count,
            "critic/clip_fraction": sum(loop_value_loss(*row, clip)[2] for row in trained) / count,
        },
        abs=1e-12,
    )


def test_loss_by_hand():
    # old 0, return 1. value 0.25: inside, (3/4)^2 / 2; value 0.9: held at 0.5, 1/8, no gradient; -2: its own is larger
    values = torch.tensor([0.25, 0.9, -2.0], requires_grad=True)
    losses, _ = clipped_value_loss(values, torch.zeros(3), torch.ones(3), torch.ones(3, dtype=torch.bool), clip=0.5)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([9 / 32, 1 / 8, 9 / 2])
    assert values.grad.tolist() == pytest.approx([-0.75, 0.0, -3.0])


def test_gradient():
    torch.manual_seed(0)
    values = torch.randn(20, dtype=torch.float64, requires_grad=True)
    old_values, returns = torch.randn(20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    mask = torch.rand(20) > 0.2
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old_values, returns, mask, clip=0.5)[0], values)


def test_untrained_tokens_never_reach_loss_gradient_or_metrics():
    rubbish = [float("nan"), float("inf")]
    values = torch.tensor([1.0, *rubbish], requires_grad=True)
    other = torch.tensor([1.0, *rubbish])
    losses, metrics = clipped_value_loss(values, other, other, torch.tensor([True, False, False]), clip=0.5)
    losses.sum().backward()
    assert losses.tolist() == [0.0, 0.0, 0.0]
    assert values.grad.tolist() == [0.0, 0.0, 0.0]
    assert [value.result() for value in metrics.values()] == [1.0, 1.0, 0.0]


@given(rows=rows, cut=st.integers(0, 10))
def test_trap_01_loss_and_metrics_are_the_same_for_every_split(rows, cut):
    denominators = Denominators(num_tokens=sum(row[3] for row in rows), num_sequences=2)

    def loss_of(part):
        arrays = tensors(part)
        losses, metrics = clipped_value_loss(*arrays, clip=0.5)
        ends = torch.tensor([0, len(part)], dtype=torch.int32)
        arguments = {"loss_mask": arrays[3], "cu_seqlens": ends, "denominators": denominators}
        return aggregate(losses, mode="token-mean", divisor=None, **arguments).item(), metrics

    parts = [loss_of(part) for part in (rows[:cut], rows[cut:]) if part]
    whole, whole_metrics = loss_of(rows)
    assert sum(loss for loss, _ in parts) == pytest.approx(whole)
    merged = merge_metrics(metrics for _, metrics in parts)
    assert {n: v.result() for n, v in merged.items()} == pytest.approx(
        {n: v.result() for n, v in whole_metrics.items()}
    )


def explained(values, returns, mask):
    return explained_variance(values, returns, mask)["critic/explained_variance"].result()


@given(rows=rows)
def test_explained_variance_is_that_of_numpy(rows):
    values, _, returns, mask = tensors(rows)
    v, r = values.detach()[mask].numpy(), returns[mask].numpy()
    if mask.any() and np.var(r) > 1e-6:
        expected = 1 - np.var(r - v) / np.var(r)
        assert explained(values.detach()[None], returns[None], mask[None]) == pytest.approx(expected, rel=1e-6)


def test_explained_variance_by_hand():
    returns, mask = torch.tensor([[0.0, 1.0, 9.0]]), torch.tensor([[True, True, False]])
    assert explained(returns, returns, mask) == 1.0
    assert explained(torch.tensor([[5.0, 6.0, 0.0]]), returns, mask) == 1.0  # a constant error is no variance
    assert explained(torch.full((1, 3), 0.5), returns, mask) == 0.0
    assert explained(torch.tensor([[1.0, 0.0, 0.0]]), returns, mask) == -3.0


def test_trap_08_explained_variance_of_equal_returns_or_of_nothing_is_zero():
    values, returns = torch.randn(2, 3), torch.full((2, 3), 0.1)
    assert explained(values, returns, torch.ones(2, 3, dtype=torch.bool)) == 0.0
    assert explained(values, returns, torch.zeros(2, 3, dtype=torch.bool)) == 0.0
    assert explained(values, torch.randn(2, 3), torch.tensor([[True, False, False], [False] * 3])) == 0.0
