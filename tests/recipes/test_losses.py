"""The bound losses against loops over tokens in numpy."""

import itertools
import math

import numpy as np
import pytest
import torch

from shardwise.config import AlgorithmConfig
from shardwise.recipes.losses import distill_loss, policy_loss, sft_loss
from shardwise.types import Denominators, TokenBatch, TokenOutputs

CU = [0, 4, 7, 9]
MASK = np.array([0, 0, 1, 1, 0, 1, 1, 0, 0], dtype=bool)  # the third sequence has no trained token
RNG = np.random.default_rng(0)
LOGPROBS, OLD, ROLLOUT, REF = (-RNG.uniform(0.1, 3.0, 9) * MASK for _ in range(4))
ADVANTAGES = RNG.normal(size=9) * MASK
DENOMINATORS = Denominators(num_tokens=10, num_sequences=4)  # of a step with more micro-batches than this one


def batch(**fields) -> TokenBatch:
    tensors = {name: torch.tensor(values, dtype=torch.float32) for name, values in fields.items()}
    return TokenBatch(
        input_ids=torch.arange(9),
        position_ids=torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 1]),
        cu_seqlens=torch.tensor(CU, dtype=torch.int32),
        loss_mask=torch.tensor(MASK),
        sample_index=[0, 1, 2],
        **tensors,
    )


def outputs() -> TokenOutputs:
    entropy = torch.tensor(np.where(MASK, 1.0 + np.arange(9), 0.0), dtype=torch.float32)
    return TokenOutputs(logprobs=torch.tensor(LOGPROBS, dtype=torch.float32, requires_grad=True), entropy=entropy)


def clipped(t: int, old: np.ndarray, low: float, high: float, dual: float | None) -> float:
    ratio, advantage = math.exp(LOGPROBS[t] - old[t]), ADVANTAGES[t]
    loss = max(-ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage)
    return min(loss, -dual * advantage) if advantage < 0 and dual is not None else loss


def k3(log_p: float, log_ref: float) -> float:
    return math.exp(log_ref - log_p) - (log_ref - log_p) - 1


def test_sft_loss_is_the_sum_of_cross_entropies_over_all_trained_tokens_of_the_step():
    result = outputs()
    loss, metrics = sft_loss(result, batch(), DENOMINATORS)
    assert loss.item() == pytest.approx(-LOGPROBS[MASK].sum() / 10, rel=1e-6)
    loss.backward()
    np.testing.assert_allclose(result.logprobs.grad, np.where(MASK, -0.1, 0.0), rtol=1e-6)
    assert metrics == {}


@pytest.mark.parametrize("coef", [0.0, 0.25])
def test_distill_loss_is_the_divergence_plus_a_share_of_the_cross_entropy(coef):
    divergence = torch.tensor(np.where(MASK, REF**2, 0.0), dtype=torch.float32, requires_grad=True)
    result = TokenOutputs(divergence=divergence, logprobs=outputs().logprobs if coef else None)
    loss, metrics = distill_loss(cross_entropy_coef=coef)(result, batch(), DENOMINATORS)
    assert loss.item() == pytest.approx((REF**2 - coef * LOGPROBS)[MASK].sum() / 10, rel=1e-6)
    loss.backward()
    np.testing.assert_allclose(divergence.grad, np.where(MASK, 0.1, 0.0), rtol=1e-6)
    found = {name: value.result() for name, value in metrics.items()}
    expected = {"train/divergence": (REF**2)[MASK].mean(), "train/cross_entropy": -LOGPROBS[MASK].mean()}
    assert found == pytest.approx(expected if coef else {"train/divergence": expected["train/divergence"]}, rel=1e-6)
    if coef:
        np.testing.assert_allclose(result.logprobs.grad, np.where(MASK, -0.1 * coef, 0.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "divisor"),
    [
        ("token-mean", None),
        ("seq-mean-token-mean", None),
        ("seq-mean-token-sum", None),
        ("seq-mean-token-sum-norm", 5.0),
        ("token-sum", None),
    ],
)
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_policy_loss_equals_a_loop_over_tokens(aggregation, divisor, kl_in):
    config = AlgorithmConfig(
        aggregation=aggregation, aggregation_divisor=divisor, clip_low=0.1, clip_high=0.3, kl_coef=0.7, kl_in=kl_in
    )
    loss, _ = policy_loss(config)(
        outputs(),
        batch(advantages=ADVANTAGES, old_logprobs=OLD, rollout_logprobs=ROLLOUT, ref_logprobs=REF),
        DENOMINATORS,
    )
    weight = {"token-mean": 1 / 10, "seq-mean-token-sum": 1 / 4, "seq-mean-token-sum-norm": 1 / 20, "token-sum": 1.0}
    expected = 0.0
    for start, end in itertools.pairwise(CU):
        for t in range(start, end):
            if MASK[t]:
                token = clipped(t, OLD, 0.1, 0.3, 3.0) + (0.7 * k3(LOGPROBS[t], REF[t]) if kl_in == "loss" else 0.0)
                trained = MASK[start:end].sum()
                expected += token * weight.get(aggregation, 1 / (4 * trained))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_without_old_logprobs_the_gradient_is_that_of_the_plain_policy_gradient():
    """The ratio is 1 and nothing is clipped: d loss / d logprob = -A / N."""
    result = outputs()
    loss, metrics = policy_loss(AlgorithmConfig(dual_clip=None))(
        result, batch(advantages=ADVANTAGES, rollout_logprobs=ROLLOUT), DENOMINATORS
    )
    loss.backward()
    np.testing.assert_allclose(result.logprobs.grad, -ADVANTAGES / 10, rtol=1e-6)
    assert loss.item() == pytest.approx(-ADVANTAGES.sum() / 10, rel=1e-5)
    assert metrics["policy/approx_kl"].result() == 0.0
    assert metrics["policy/clip_fraction_low"].result() == 0.0


def test_policy_metrics_are_means_over_trained_tokens():
    _, metrics = policy_loss(AlgorithmConfig(kl_coef=0.1, kl_in="reward"))(
        outputs(),
        batch(advantages=ADVANTAGES, old_logprobs=OLD, rollout_logprobs=ROLLOUT, ref_logprobs=REF),
        DENOMINATORS,
    )
    trained = np.flatnonzero(MASK)
    found = {name: value.result() for name, value in metrics.items()}
    assert found["policy/entropy"] == pytest.approx((1.0 + trained).mean(), rel=1e-6)
    assert found["policy/ref_kl"] == pytest.approx(np.mean([k3(LOGPROBS[t], REF[t]) for t in trained]), rel=1e-5)
    assert found["rollout/logprob_abs_diff"] == pytest.approx(np.abs(OLD - ROLLOUT)[MASK].mean(), rel=1e-5)
    assert found["rollout/logprob_abs_diff_max"] == pytest.approx(np.abs(OLD - ROLLOUT)[MASK].max(), rel=1e-5)
    assert metrics["policy/entropy"].count == 4


def test_a_micro_batch_without_samples_has_loss_zero_and_a_graph():
    """An idle rank still runs backward."""
    empty = TokenBatch(
        input_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        sample_index=[],
        **{name: torch.zeros(1) for name in ("advantages", "rollout_logprobs", "ref_logprobs", "old_logprobs")},
    )
    logprobs = torch.zeros(1, requires_grad=True)
    result = TokenOutputs(logprobs=logprobs, entropy=torch.zeros(1), divergence=logprobs)
    for loss_fn in (sft_loss, distill_loss(cross_entropy_coef=0.5), policy_loss(AlgorithmConfig(kl_coef=1.0))):
        loss, _ = loss_fn(result, empty, DENOMINATORS)
        assert loss.item() == 0.0
        loss.backward()
    assert logprobs.grad.item() == 0.0
