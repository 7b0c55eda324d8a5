from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.algorithms.masked import (
    Aggregation,
    aggregate,
    sequence_means,
    sequence_sums,
    spread,
    trained_mean,
    whitened,
)
from shardwise.config import AlgorithmConfig
from shardwise.config.base import groups_of, tag_of
from shardwise.types import Denominators, merge_metrics

MODES = get_args(Aggregation)
DIVISOR = 7.0


def divisor_of(mode):
    return DIVISOR if mode == "seq-mean-token-sum-norm" else None


def packed(sequences):
    """Sequences of (loss, trained) pairs as [T] losses, [T] mask and [S + 1] cu_seqlens."""
    tokens = [token for sequence in sequences for token in sequence]
    losses = torch.tensor([loss for loss, _ in tokens], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([trained for _, trained in tokens], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, *np.cumsum([len(s) for s in sequences])], dtype=torch.int32)
    return losses, mask, cu_seqlens


def counts(sequences):
    lengths = [sum(trained for _, trained in sequence) for sequence in sequences]
    return Denominators(num_tokens=sum(lengths), num_sequences=sum(n > 0 for n in lengths))


def loop_loss(sequences, mode):
    """Value and gradient of the whole step, as loops over the formulas."""
    denominators = counts(sequences)
    num_tokens, num_sequences = max(denominators.num_tokens, 1), max(denominators.num_sequences, 1)
    total, gradient = 0.0, []
    for sequence in sequences:
        trained_length = sum(trained for _, trained in sequence)
        weight = {
            "token-mean": 1 / num_tokens,
            "seq-mean-token-mean": 1 / (max(trained_length, 1) * num_sequences),
            "seq-mean-token-sum": 1 / num_sequences,
            "seq-mean-token-sum-norm": 1 / (num_sequences * DIVISOR),
            "token-sum": 1.0,
        }[mode]
        for loss, trained in sequence:
            total += weight * loss if trained else 0.0
            gradient.append(weight if trained else 0.0)
    return total, gradient


tokens = st.tuples(st.floats(-50, 50), st.booleans())
steps = st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=6)


def test_modes_are_those_of_the_config():
    names = {tag_of(choice)[1] for choice in groups_of(AlgorithmConfig.model_fields["aggregation"].annotation)}
    assert set(MODES) == names - {"custom"}


def test_sequence_sums_by_hand():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert sequence_sums(values, torch.tensor([0, 2, 2, 5], dtype=torch.int32)).tolist() == [3.0, 0.0, 12.0]


def test_sequence_means_are_over_trained_tokens():
    values = torch.tensor([0.0, 2.0, 4.0, 0.0, 5.0, 0.0])  # 0 where not trained
    loss_mask = torch.tensor([False, True, True, False, True, False])
    cu_seqlens = torch.tensor([0, 3, 5, 6], dtype=torch.int32)
    assert sequence_means(values, loss_mask, cu_seqlens).tolist() == [3.0, 5.0, 0.0]


def test_spread_gives_each_token_its_sequences_value_without_a_gradient():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    spread_values = spread(values, torch.tensor([0, 2, 2, 5], dtype=torch.int32), 5)
    assert spread_values.tolist() == [1.0, 1.0, 3.0, 3.0, 3.0]
    assert not spread_values.requires_grad


def test_sequence_sums_gradient():
    values = torch.randn(5, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda v: sequence_sums(v, cu_seqlens).square(), values)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # losses 1, 2 | 6 with 2 and 1 trained tokens; a third sequence has none
        ("token-mean", 9 / 3),
        ("seq-mean-token-mean", (1.5 + 6) / 2),
        ("seq-mean-token-sum", 9 / 2),
        ("seq-mean-token-sum-norm", 9 / 2 / 7),
        ("token-sum", 9.0),
    ],
)
def test_aggregate_by_hand(mode, expected):
    sequences = [[(9.0, False), (1.0, True), (2.0, True)], [(9.0, False), (6.0, True)], [(9.0, False), (9.0, False)]]
    losses, loss_mask, cu_seqlens = packed(sequences)
    value = aggregate(
        losses,
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
        denominators=Denominators(num_tokens=3, num_sequences=2),
        mode=mode,
        divisor=divisor_of(mode),
    )
    assert value.item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None, max_examples=60)
@given(sequences=steps, data=st.data())
def test_aggregate_is_the_same_for_every_split_order_and_packing(mode, sequences, data):
    order = data.draw(st.permutations(range(len(sequences))))
    place = data.draw(st.lists(st.integers(0, 2), min_size=len(order), max_size=len(order)))
    micro_batches = [[i for i, p in zip(order, place, strict=True) if p == k] for k in range(3)]
    expected, expected_gradient = loop_loss(sequences, mode)
    expected_gradient = np.split(expected_gradient, np.cumsum([len(s) for s in sequences])[:-1])

    total = 0.0
    for indices in micro_batches:
        members = [sequences[i] for i in indices] or [[(0.0, False)]]  # an empty micro-batch is one masked token
        losses, loss_mask, cu_seqlens = packed(members)
        share = aggregate(
            losses,
            loss_mask=loss_mask,
            cu_seqlens=cu_seqlens,
            denominators=counts(sequences),
            mode=mode,
            divisor=divisor_of(mode),
        )
        share.backward()
        total += share.item()
        gradients = losses.grad.split([len(m) for m in members])
        for i, gradient in zip(indices, gradients, strict=False):
            np.testing.assert_allclose(gradient, expected_gradient[i], rtol=1e-12)
    assert total == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_aggregate_gradient(mode):
    losses, loss_mask, cu_seqlens = packed([[(1.0, True), (2.0, False)], [(3.0, True), (-4.0, True)]])
    arguments = {"loss_mask": loss_mask, "cu_seqlens": cu_seqlens, "mode": mode, "divisor": divisor_of(mode)}
    denominators = Denominators(num_tokens=3, num_sequences=2)
    assert torch.autograd.gradcheck(lambda x: aggregate(x, denominators=denominators, **arguments), losses)


@pytest.mark.parametrize("mode", MODES)
def test_aggregate_of_an_empty_step_is_zero_with_a_graph(mode):
    losses, loss_mask, cu_seqlens = packed([[(float("nan"), False)]])
    denominators = Denominators(num_tokens=0, num_sequences=0)
    arguments = {"loss_mask": loss_mask, "cu_seqlens": cu_seqlens, "denominators": denominators}
    value = aggregate(losses, mode=mode, divisor=divisor_of(mode), **arguments)
    value.backward()
    assert value.item() == 0.0
    assert losses.grad.tolist() == [0.0]


@pytest.mark.parametrize(
    ("mode", "divisor", "message"),
    [
        ("token-mean", 7.0, "divisor=7.0"),
        ("seq-mean-token-sum-norm", None, "divisor=None"),
        ("mean", None, "use one of token-mean, seq-mean"),
    ],
)
def test_aggregate_refuses_what_has_no_meaning(mode, divisor, message):
    losses, loss_mask, cu_seqlens = packed([[(1.0, True)]])
    arguments = {"loss_mask": loss_mask, "cu_seqlens": cu_seqlens, "denominators": counts([[(1.0, True)]])}
    with pytest.raises(ValueError, match=message):
        aggregate(losses, mode=mode, divisor=divisor, **arguments)


def test_trap_13_trained_mean_weights_every_token_equally():
    """Three tokens in one micro-batch and one in the other, not the mean of two means."""
    first = trained_mean(torch.tensor([1.0, 2.0, 3.0, 99.0]), torch.tensor([True, True, True, False]))
    second = trained_mean(torch.tensor([10.0, float("nan")]), torch.tensor([True, False]))
    assert merge_metrics([{"x": first}, {"x": second}])["x"].result() == (1 + 2 + 3 + 10) / 4


def test_trained_mean_of_bools_is_a_fraction_and_of_nothing_is_zero():
    holds = torch.tensor([True, False, True, True])
    assert trained_mean(holds, torch.tensor([True, True, True, False])).result() == pytest.approx(2 / 3)
    assert trained_mean(holds, torch.zeros(4, dtype=torch.bool)).result() == 0.0


@given(
    values=st.lists(st.floats(-5, 5), min_size=2, max_size=12),
    mask=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_whitened_has_mean_0_and_variance_1_over_trained_tokens(values, mask):
    mask = torch.tensor(mask[: len(values)])
    values = torch.tensor(values, dtype=torch.float64)
    trained = values[mask].numpy()
    found = whitened(values.where(mask, float("nan")), mask)
    assert not found[~mask].any()
    if len(trained) > 1:
        expected = (trained - trained.mean()) / np.sqrt(trained.var(ddof=1) + 1e-8)
        np.testing.assert_allclose(found[mask], expected, atol=1e-9)


def test_trap_08_whitening_one_token_equal_values_or_nothing_is_zero():
    values = torch.tensor([[3.0, 3.0, 7.0]], dtype=torch.float64)
    for mask in ([True, True, False], [False, False, True], [False] * 3):
        assert not whitened(values, torch.tensor([mask])).any()
