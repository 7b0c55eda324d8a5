import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.algorithms.masked import aggregate
from shardwise.algorithms.rollout_correction import correction_metrics, rollout_rejection, rollout_weights
from shardwise.types import Denominators

LEVELS = ("token", "sequence-sum", "sequence-mean", "sequence-max")
NAN = float("nan")


@st.composite
def steps(draw):
    num_samples, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    size = num_samples * width
    logprob = st.floats(-3, 0) | st.floats(-50, 0)
    arrays = [draw(st.lists(logprob, min_size=size, max_size=size)) for _ in range(2)]
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    old, rollout = (torch.tensor(a, dtype=torch.float64).view(num_samples, width) for a in arrays)
    return old, rollout, torch.tensor(mask).view(num_samples, width)


def clamp(x):
    return min(max(x, -20.0), 20.0)


def log_ratios(step):
    """Of each sample the clamped log ratios of its trained tokens, by place."""
    old, rollout, mask = step
    return [
        {t: clamp(float(old[i, t] - rollout[i, t])) for t in range(mask.shape[1]) if mask[i, t]}
        for i in range(len(mask))
    ]


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@settings(max_examples=60)
@given(step=steps())
def test_weights_equal_the_formula_written_as_a_loop(level, mode, step):
    low, high = (0.5137, 2.137) if mode == "mask" else (None, 2.137)
    expected = np.zeros(step[0].shape)
    for i, sample in enumerate(log_ratios(step)):
        for t, log_ratio in sample.items():
            ratio = math.exp(log_ratio if level == "token" else clamp(sum(sample.values())))
            kept = mode == "truncate" or 0.5137 <= ratio <= 2.137
            expected[i, t] = min(ratio, 2.137) if kept else 0.0
    weights = rollout_weights(*step, level=level, mode=mode, low=low, high=high)
    np.testing.assert_allclose(weights, expected, rtol=1e-9)


def values_of(log_ratio, estimator):
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(log_ratio) - log_ratio - 1}[estimator]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60)
@given(step=steps(), low=st.floats(0.05, 0.99) | st.none(), high=st.floats(1.01, 20))
def test_rejection_equals_the_formula_written_as_a_loop(level, estimator, step, low, high):
    low = low if estimator == "k1" else None
    expected = np.zeros(step[0].shape, dtype=bool)
    for i, sample in enumerate(log_ratios(step)):
        values = {t: values_of(log_ratio, estimator) for t, log_ratio in sample.items()}
        for t, value in values.items():
            match level:
                case "sequence-sum":
                    checked = [sum(values.values())]
                case "sequence-mean":
                    checked = [sum(values.values()) / len(values)]
                case "sequence-max":
                    checked = list(values.values())
                case "token":
                    checked = [value]
            lowest = -math.inf if low is None else low
            if estimator == "k1":
                checked = [math.exp(x) for x in checked]
            expected[i, t] = all(lowest <= x <= high for x in checked)
    kept = rollout_rejection(*step, level=level, estimator=estimator, low=low, high=high)
    assert kept.tolist() == expected.tolist()
    assert not (kept & ~step[2]).any()


def ratios(rows):
    """Logprobs with these ratios of trainer over rollout; where the ratio is None nothing is trained."""
    loss_mask = torch.tensor([[r is not None for r in row] for row in rows])
    rollout = torch.full(loss_mask.shape, -2.0).where(loss_mask, NAN)
    old = rollout + torch.tensor([[math.log(r or 1.0) for r in row] for row in rows])
    return old, rollout, loss_mask


def test_weights_by_hand():
    step = ratios([[4.0, 0.25, None], [1.5, 1.0, 2.0]])
    truncated = rollout_weights(*step, level="token", mode="truncate", low=None, high=2.0)
    np.testing.assert_allclose(truncated, [[2.0, 0.25, 0.0], [1.5, 1.0, 2.0]], rtol=1e-6)
    masked = rollout_weights(*step, level="token", mode="mask", low=0.5, high=3.0)
    np.testing.assert_allclose(masked, [[0.0, 0.0, 0.0], [1.5, 1.0, 2.0]], rtol=1e-6)
    without_low = rollout_weights(*step, level="token", mode="mask", low=None, high=3.0)
    np.testing.assert_allclose(without_low, [[0.0, 0.25, 0.0], [1.5, 1.0, 2.0]], rtol=1e-6)
    products = rollout_weights(*step, level="sequence", mode="truncate", low=None, high=2.0)
    np.testing.assert_allclose(products, [[1.0, 1.0, 0.0], [2.0, 2.0, 2.0]], rtol=1e-6)
    assert products.dtype == torch.float32


def test_trap_07_thresholds_apply_to_the_ratio_and_not_to_its_inverse():
    """The trainer finds the first token 4 times likelier, the second 4 times less likely than the engine."""
    step = ratios([[4.0, 0.25]])
    upper = rollout_rejection(*step, level="token", estimator="k1", low=None, high=2.0)
    assert upper.tolist() == [[False, True]]
    lower = rollout_rejection(*step, level="token", estimator="k1", low=0.5, high=None)
    assert lower.tolist() == [[True, False]]


def test_rejection_of_sequences_by_hand():
    # products 1 and 8; geometric means 1 and 2; ratios outside [1/3, 3] in the first alone
    step = ratios([[4.0, 0.25, None], [2.0, 2.0, 2.0]])

    def kept(level, low, high):
        return rollout_rejection(*step, level=level, estimator="k1", low=low, high=high).any(1).tolist()

    assert kept("sequence-sum", 0.5, 3.0) == [True, False]
    assert kept("sequence-mean", 0.5, 3.0) == [True, True]
    assert kept("sequence-mean", 0.5, 1.9) == [True, False]
    assert kept("sequence-max", 1 / 3, 3.0) == [False, True]
    # k2 of the first: 2 x log(4)^2 / 2 = 1.92, of the second 3 x log(2)^2 / 2 = 0.72
    k2 = rollout_rejection(*step, level="sequence-sum", estimator="k2", low=None, high=1.0)
    assert k2.tolist() == [[False] * 3, [True] * 3]
    # k3: 4 - log 4 - 1 = 1.61 and 1/4 + log 4 - 1 = 0.64
    k3 = rollout_rejection(*step, level="token", estimator="k3", low=None, high=1.0)
    assert k3.tolist() == [[False, True, False], [True, True, True]]


def test_trap_07_rejected_tokens_leave_the_denominator_and_weights_of_zero_do_not():
    step = ratios([[4.0, 1.0, 1.0]])
    losses, cu_seqlens = torch.ones(3), torch.tensor([0, 3], dtype=torch.int32)

    def token_mean(losses, mask):
        denominators = Denominators(num_tokens=int(mask.sum()), num_sequences=1)
        arguments = {"loss_mask": mask, "cu_seqlens": cu_seqlens, "denominators": denominators}
        return aggregate(losses, mode="token-mean", divisor=None, **arguments).item()

    kept = rollout_rejection(*step, level="token", estimator="k1", low=None, high=2.0)
    assert token_mean(losses, kept[0]) == 1.0
    weights = rollout_weights(*step, level="token", mode="mask", low=None, high=2.0)
    assert token_mean(losses * weights[0], step[2][0]) == pytest.approx(2 / 3)


def test_f37_infinite_logprobs_are_clamped_and_nan_is_rejected():
    old = torch.tensor([[-1.0, -1.0, -math.inf, NAN]])
    rollout = torch.tensor([[-math.inf, -1.0, -1.0, -1.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    weights = rollout_weights(old, rollout, mask, level="token", mode="truncate", low=None, high=1e9)
    np.testing.assert_allclose(weights[:, :3], [[math.exp(20), 1.0, math.exp(-20)]], rtol=1e-6)
    masked = rollout_weights(old, rollout, mask, level="token", mode="mask", low=0.5, high=2.0)
    assert masked.tolist() == [[0.0, 1.0, 0.0, 0.0]]
    for level in LEVELS:
        kept = rollout_rejection(old, rollout, mask, level=level, estimator="k1", low=0.5, high=2.0)
        assert kept.tolist() == [[False, level == "token", False, False]]


@settings(max_examples=30)
@given(step=steps(), left=st.integers(0, 2), data=st.data())
def test_order_and_padding_do_not_matter(step, left, data):
    order = torch.tensor(data.draw(st.permutations(range(len(step[0])))))
    moved = [torch.nn.functional.pad(array[order], (left, 1)) for array in step]

    def both(arrays):
        weights = rollout_weights(*arrays, level="sequence", mode="truncate", low=None, high=2.137)
        kept = rollout_rejection(*arrays, level="sequence-mean", estimator="k3", low=None, high=0.5137)
        return weights, kept.double()

    for found, expected in zip(both(moved), both(step), strict=True):
        torch.testing.assert_close(found, torch.nn.functional.pad(expected[order], (left, 1)))


@settings(max_examples=60)
@given(step=steps())
def test_weights_keep_their_bounds(step):
    for level in ("token", "sequence"):
        truncated = rollout_weights(*step, level=level, mode="truncate", low=None, high=2.0)
        assert truncated.max() <= 2.0
        assert (truncated[step[2]] > 0).all()
        masked = rollout_weights(*step, level=level, mode="mask", low=0.5, high=2.0)
        assert ((masked == 0) | ((masked >= 0.5) & (masked <= 2.0))).all()


def test_metrics_by_hand():
    step = ratios([[4.0, 0.25, None], [1.5, 1.0, 2.5], [None, None, None]])
    weights = rollout_weights(*step, level="token", mode="truncate", low=None, high=2.2)
    kept = rollout_rejection(*step, level="sequence-max", estimator="k1", low=0.5, high=3.0)
    metrics = correction_metrics(weights, kept, step[2], high=2.2)
    assert {name: value.result() for name, value in metrics.items()} == pytest.approx(
        {
            "rollout/weight": (2.2 + 0.25 + 1.5 + 1.0 + 2.2) / 5,
            "rollout/weight_truncated_fraction": 2 / 5,
            "rollout/weight_masked_fraction": 0.0,
            "rollout/rejected_fraction": 2 / 5,
            "rollout/rejected_sequence_fraction": 1 / 2,
        }
    )
    masked = rollout_weights(*step, level="token", mode="mask", low=0.5, high=2.2)
    metrics = correction_metrics(masked, step[2], step[2], high=2.2)
    assert metrics["rollout/weight_masked_fraction"].result() == pytest.approx(3 / 5)
    assert metrics["rollout/rejected_fraction"].result() == 0.0


def test_nothing_trained_is_defined():
    nothing = (torch.full((2, 2), NAN), torch.full((2, 2), NAN), torch.zeros(2, 2, dtype=torch.bool))
    weights = rollout_weights(*nothing, level="sequence", mode="truncate", low=None, high=2.0)
    assert not weights.any()
    for level in LEVELS:
        kept = rollout_rejection(*nothing, level=level, estimator="k3", low=None, high=1.0)
        assert not kept.any()
    metrics = correction_metrics(weights, kept, nothing[2], high=2.0)
    assert {value.result() for value in metrics.values()} == {0.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "truncate"}, "low=0.5 has no effect in mode truncate"),
        ({"low": 3.0}, "low=3.0 lies above high=2.0"),
        ({"high": 0.0}, "high=0.0 must be positive"),
        ({"level": "group"}, "level=group is not known; use token or sequence"),
        ({"mode": "drop"}, "mode=drop is not known; use truncate or mask"),
    ],
)
def test_weights_refuse_what_has_no_meaning(changes, message):
    with pytest.raises(ValueError, match=message):
        rollout_weights(*ratios([[1.0]]), **{"level": "token", "mode": "mask", "low": 0.5, "high": 2.0} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"low": None, "high": None}, "rejects nothing"),
        ({"estimator": "k3"}, "low=0.5 with estimator=k3"),
        ({"low": 3.0}, "low=3.0 lies above high=2.0"),
        ({"estimator": "abs", "low": None}, "estimator=abs is not known; use k1, k2 or k3"),
        ({"level": "sequence"}, "level=sequence is not known; use token, sequence-sum"),
    ],
)
def test_rejection_refuses_what_has_no_meaning(changes, message):
    arguments = {"level": "token", "estimator": "k1", "low": 0.5, "high": 2.0} | changes
    with pytest.raises(ValueError, match=message):
        rollout_rejection(*ratios([[1.0]]), **arguments)
