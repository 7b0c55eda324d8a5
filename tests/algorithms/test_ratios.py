import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.algorithms.ratios import clamped_log_ratio, derived_mismatch_metrics, mismatch_metrics
from shardwise.types import merge_metrics

rows = st.lists(st.tuples(st.floats(-40, 0), st.floats(-40, 0), st.booleans()), min_size=1, max_size=10)


def tensors(rows):
    logprobs, rollout_logprobs, mask = zip(*rows, strict=True)
    return (
        torch.tensor(logprobs, dtype=torch.float64, requires_grad=True),
        torch.tensor(rollout_logprobs, dtype=torch.float64),
        torch.tensor(mask),
    )


def loop_metrics(rows):
    trained = [(new, rollout) for new, rollout, is_trained in rows if is_trained]
    differences = [abs(new - rollout) for new, rollout in trained]
    log_ratios = [min(max(new - rollout, -20.0), 20.0) for new, rollout in trained]
    ratios = [math.exp(x) for x in log_ratios]
    count = max(len(trained), 1)
    return {
        "rollout/logprob_abs_diff": sum(differences) / count,
        "rollout/logprob_abs_diff_max": max(differences, default=0.0),
        "rollout/kl_k3": sum(min(math.exp(x) - x - 1, 10.0) for x in log_ratios) / count,
        "rollout/log_ratio_clamped": sum(d > 20 for d in differences),
        "rollout/ratio": sum(ratios) / count,
        "rollout/ratio_squared": sum(r * r for r in ratios) / count,
        "rollout/logprob": sum(rollout for _, rollout in trained) / count,
        "policy/logprob": sum(new for new, _ in trained) / count,
    }


def results(metrics):
    return {name: value.result() for name, value in metrics.items()}


@given(rows=rows, cut=st.integers(0, 10))
def test_metrics_equal_the_loop_for_every_micro_batch_split(rows, cut):
    parts = [mismatch_metrics(*tensors(part)) for part in (rows[:cut], rows[cut:]) if part]
    assert results(merge_metrics(parts)) == pytest.approx(loop_metrics(rows), rel=1e-9, abs=1e-12)


def test_metrics_by_hand():
    logprobs, rollout_logprobs = torch.tensor([0.5, 0.5, 0.9]).log(), torch.tensor([0.25, 0.5, 0.1]).log()
    metrics = results(mismatch_metrics(logprobs, rollout_logprobs, torch.tensor([True, True, False])))
    assert metrics["rollout/logprob_abs_diff"] == pytest.approx(math.log(2) / 2)
    assert metrics["rollout/logprob_abs_diff_max"] == pytest.approx(math.log(2))
    assert metrics["rollout/kl_k3"] == pytest.approx((2 - math.log(2) - 1) / 2)


def test_agreement_and_an_empty_batch_are_defined_without_a_graph():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    agreement = dict.fromkeys(loop_metrics([]), 0.0) | {
        "rollout/ratio": 1.0,
        "rollout/ratio_squared": 1.0,
        "rollout/logprob": -1.5,
        "policy/logprob": -1.5,
    }
    for mask, expected in (([True, True], agreement), ([False, False], dict.fromkeys(agreement, 0.0))):
        metrics = mismatch_metrics(logprobs, logprobs.detach(), torch.tensor(mask))
        assert results(metrics) == expected
        assert not any(value.total.requires_grad for value in metrics.values())


@given(rows=rows, cut=st.integers(0, 10))
def test_trap_13_derived_metrics_follow_from_the_merged_means(rows, cut):
    """Not from means per micro-batch: an effective sample size of parts says nothing about that of the whole."""
    trained = [(new, rollout) for new, rollout, is_trained in rows if is_trained]
    ratios = [math.exp(min(max(new - rollout, -20.0), 20.0)) for new, rollout in trained] or [1.0]
    mean, mean_square = sum(ratios) / len(ratios), sum(r * r for r in ratios) / len(ratios)
    count = max(len(trained), 1)
    parts = [mismatch_metrics(*tensors(part)) for part in (rows[:cut], rows[cut:]) if part]
    derived = results(derived_mismatch_metrics(merge_metrics(parts)))
    assert derived == pytest.approx(
        {
            "rollout/chi2": mean_square - 1,
            "rollout/effective_sample_size": mean**2 / mean_square,
            "rollout/perplexity": math.exp(-sum(rollout for _, rollout in trained) / count),
            "policy/perplexity": math.exp(-sum(new for new, _ in trained) / count),
        },
        rel=1e-9,
        abs=1e-9,
    )
    assert 0 < derived["rollout/effective_sample_size"] <= 1 + 1e-9


def test_derived_metrics_by_hand():
    # rho 2 and 1: mean 3/2, mean square 5/2
    logprobs, rollout_logprobs = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.5]).log()
    metrics = mismatch_metrics(logprobs, rollout_logprobs, torch.ones(2, dtype=torch.bool))
    derived = results(derived_mismatch_metrics(metrics))
    assert derived["rollout/chi2"] == pytest.approx(1.5)
    assert derived["rollout/effective_sample_size"] == pytest.approx(2.25 / 2.5)
    assert derived["policy/perplexity"] == pytest.approx(2.0)
    assert derived["rollout/perplexity"] == pytest.approx(math.sqrt(8))


def test_f37_infinite_logprobs_of_the_engine_are_clamped_and_counted():
    logprobs = torch.tensor([-1.0, -1.0, -1.0])
    rollout_logprobs = torch.tensor([-math.inf, -1.0, -100.0])
    metrics = mismatch_metrics(logprobs, rollout_logprobs, torch.ones(3, dtype=torch.bool))
    found = results(metrics)
    assert found["rollout/log_ratio_clamped"] == 2
    assert found["rollout/ratio"] == pytest.approx((2 * math.exp(20) + 1) / 3)
    assert found["rollout/logprob_abs_diff_max"] == math.inf
    derived = results(derived_mismatch_metrics(metrics))
    assert derived["rollout/perplexity"] == math.inf
    assert 1 / 3 < derived["rollout/effective_sample_size"] <= 0.67


def test_perplexity_beyond_float_is_infinite():
    logprobs = torch.full((1,), -1e3)
    metrics = mismatch_metrics(logprobs, logprobs, torch.ones(1, dtype=torch.bool))
    assert results(derived_mismatch_metrics(metrics))["policy/perplexity"] == math.inf


@given(rows=rows)
def test_clamped_log_ratio_is_clamped_and_counted(rows):
    logprobs, old_logprobs, mask = tensors(rows)
    log_ratio, metrics = clamped_log_ratio(logprobs, old_logprobs, mask)
    log_ratio.sum().backward()
    for i, (new, old, trained) in enumerate(rows):
        assert log_ratio[i].item() == pytest.approx(min(max(new - old, -20), 20) if trained else 0.0)
        assert logprobs.grad[i].item() == (trained and abs(new - old) <= 20)
    expected = loop_metrics(rows)
    assert metrics["policy/log_ratio_clamped"].result() == expected["rollout/log_ratio_clamped"]
    # the old policy sampled, as the rollout engine did above
    assert metrics["policy/approx_kl"].result() == pytest.approx(expected["rollout/kl_k3"], rel=1e-9, abs=1e-12)
