import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.algorithms.ratios import mismatch_metrics
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
    count = max(len(trained), 1)
    return {
        "rollout/logprob_abs_diff": sum(differences) / count,
        "rollout/logprob_abs_diff_max": max(differences, default=0.0),
        "rollout/kl_k3": sum(min(math.exp(x) - x - 1, 10.0) for x in log_ratios) / count,
    }


def results(metrics):
    return {name: value.result() for name, value in metrics.items()}


@given(rows=rows, cut=st.integers(0, 10))
def test_metrics_equal_the_loop_for_every_micro_batch_split(rows, cut):
    parts = [mismatch_metrics(*tensors(part)) for part in (rows[:cut], rows[cut:]) if part]
    assert results(merge_metrics(parts)) == pytest.approx(loop_metrics(rows), abs=1e-12)


def test_metrics_by_hand():
    logprobs, rollout_logprobs = torch.tensor([0.5, 0.5, 0.9]).log(), torch.tensor([0.25, 0.5, 0.1]).log()
    metrics = results(mismatch_metrics(logprobs, rollout_logprobs, torch.tensor([True, True, False])))
    assert metrics["rollout/logprob_abs_diff"] == pytest.approx(math.log(2) / 2)
    assert metrics["rollout/logprob_abs_diff_max"] == pytest.approx(math.log(2))
    assert metrics["rollout/kl_k3"] == pytest.approx((2 - math.log(2) - 1) / 2)


def test_agreement_and_an_empty_batch_are_zero_without_a_graph():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    for mask in ([True, True], [False, False]):
        metrics = mismatch_metrics(logprobs, logprobs.detach(), torch.tensor(mask))
        assert set(results(metrics).values()) == {0.0}
        assert not any(value.total.requires_grad for value in metrics.values())
