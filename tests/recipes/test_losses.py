"""The bound losses against loops over tokens in numpy."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from shardwise.config import AlgorithmConfig, BradleyTerry, CriticConfig, PreferenceLoss
from shardwise.config.base import groups_of
from shardwise.recipes import losses
from shardwise.recipes.losses import (
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    LossSource,
    distill_loss,
    policy_loss,
    sft_loss,
)
from shardwise.types import Denominators, MetricValue, TokenBatch, TokenOutputs, merge_metrics

PREFERENCE: TypeAdapter[PreferenceLoss] = TypeAdapter(PreferenceLoss)

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
        aggregation=aggregation if divisor is None else {"name": aggregation, "divisor": divisor},
        policy_loss={"clip_low": 0.1, "clip_high": 0.3},
        num_epochs=2,
        kl_coef=99.0,  # where it began; the loss is bound with what it is now
        kl_in=kl_in,
    )
    loss, _ = policy_loss(config, kl_coef=0.7)(
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
    loss, metrics = policy_loss(AlgorithmConfig(policy_loss={"dual_clip": None}), kl_coef=0)(
        result, batch(advantages=ADVANTAGES, rollout_logprobs=ROLLOUT), DENOMINATORS
    )
    loss.backward()
    np.testing.assert_allclose(result.logprobs.grad, -ADVANTAGES / 10, rtol=1e-6)
    assert loss.item() == pytest.approx(-ADVANTAGES.sum() / 10, rel=1e-5)
    assert metrics["policy/approx_kl"].result() == 0.0
    assert metrics["policy/clip_fraction_low"].result() == 0.0


def test_policy_metrics_are_means_over_trained_tokens():
    _, metrics = policy_loss(AlgorithmConfig(kl_coef=0.1, kl_in="reward"), kl_coef=0.1)(
        outputs(),
        batch(advantages=ADVANTAGES, old_logprobs=OLD, rollout_logprobs=ROLLOUT, ref_logprobs=REF),
        DENOMINATORS,
    )
    trained = np.flatnonzero(MASK)
    found = {name: value.result() for name, value in metrics.items()}
    assert found["policy/entropy"] == pytest.approx((1.0 + trained).mean(), rel=1e-6)
    assert found["policy/ref_kl"] == pytest.approx(np.mean([k3(LOGPROBS[t], REF[t]) for t in trained]), rel=1e-5)
    assert found["rollout/logprob_abs_diff"] == pytest.approx(np.abs(LOGPROBS - ROLLOUT)[MASK].mean(), rel=1e-5)
    assert found["rollout/logprob_abs_diff_max"] == pytest.approx(np.abs(LOGPROBS - ROLLOUT)[MASK].max(), rel=1e-5)
    assert metrics["policy/entropy"].count == 4


@pytest.mark.parametrize(
    ("settings", "compares"),
    [({}, True), ({"rollout_correction": {"bypass": True}}, True), ({"num_epochs": 2}, False)],
)
def test_trap_09_trainer_and_rollout_are_compared_once_in_a_step(settings, compares):
    """The trainer's own logprobs, in bypass too. Where they are scored before the step it is done there, before
    rejection hides what is far apart."""
    arrays = {"advantages": ADVANTAGES, "old_logprobs": ROLLOUT, "rollout_logprobs": ROLLOUT}
    _, metrics = policy_loss(AlgorithmConfig(**settings), kl_coef=0.0)(outputs(), batch(**arrays), DENOMINATORS)
    assert ("rollout/kl_k3" in metrics) == compares
    if compares:
        found = metrics["rollout/logprob_abs_diff"].result()
        assert found == pytest.approx(np.abs(LOGPROBS - ROLLOUT)[MASK].mean(), rel=1e-5) != 0


def empty_batch(*names) -> TokenBatch:
    return TokenBatch(
        input_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        sample_index=[],
        **{name: torch.zeros(1, dtype=torch.bool if name == "selected" else torch.float32) for name in names},
    )


POLICY_FIELDS = ("advantages", "rollout_logprobs", "ref_logprobs", "old_logprobs", "importance_weights")
COVARIANCE = ("clip_cov", "kl_cov")


@pytest.mark.parametrize(
    ("kind", "config", "numbers", "fields"),
    [
        ("sft", "", {}, ()),
        *(
            (
                "policy",
                AlgorithmConfig(policy_loss=name, kl_coef=1.0),
                {"kl_coef": 1.0},
                (*POLICY_FIELDS, *["selected"] * (name in COVARIANCE)),
            )
            for name in (*POLICY_LOSSES, *COVARIANCE)
        ),
        ("value", CriticConfig(), {}, ("values", "returns")),
        *(
            ("preference", PREFERENCE.validate_python(name), {"kl": 0.5}, ("rewards", "ref_logprobs"))
            for name in (*PREFERENCE_LOSSES, "kto")
        ),
        ("reward_model", BradleyTerry(), {}, ("rewards",)),
    ],
)
def test_a_micro_batch_without_samples_has_loss_zero_and_a_graph(kind, config, numbers, fields):
    """An idle rank still runs backward."""
    loss_fn = LossSource(kind=kind, config=config and config.model_dump_json(), numbers=numbers).make().function
    scored = torch.zeros(1, requires_grad=True)
    names = ("values",) if kind in ("value", "reward_model") else ("logprobs",)
    result = TokenOutputs(**dict.fromkeys(names, scored), entropy=torch.zeros(1))
    loss, metrics = loss_fn(result, empty_batch(*fields), Denominators(num_tokens=10, num_sequences=4))
    assert loss.item() == 0.0
    loss.backward()
    assert scored.grad.item() == 0.0
    assert all(value.result() == 0.0 for name, value in metrics.items() if value.kind == "mean"), metrics


def test_a_micro_batch_without_samples_has_nothing_to_learn_from_a_teacher():
    divergence, logprobs = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    loss, _ = distill_loss(cross_entropy_coef=0.5)(
        TokenOutputs(divergence=divergence, logprobs=logprobs), empty_batch(), DENOMINATORS
    )
    assert loss.item() == 0.0
    loss.backward()
    assert (divergence.grad.item(), logprobs.grad.item()) == (0.0, 0.0)


@pytest.mark.parametrize("kind", ["sft", "policy", "value", "preference", "reward_model"])
def test_only_the_policy_loss_looks_at_the_entropy(kind):
    configs = {
        "sft": "",
        "policy": AlgorithmConfig().model_dump_json(),
        "value": CriticConfig().model_dump_json(),
        "preference": PREFERENCE.validate_python("dpo").model_dump_json(),
        "reward_model": BradleyTerry().model_dump_json(),
    }
    numbers = {"policy": {"kl_coef": 0.0}, "preference": {"kl": 0.0}}
    source = LossSource(kind=kind, config=configs[kind], numbers=numbers.get(kind, {}))
    assert source.make().with_entropy == (kind == "policy")


OTHER = {
    "clip_low": 0.3,
    "clip_high": 0.7,
    "dual_clip": 2.0,
    "tau_positive": 2.0,
    "tau_negative": 3.0,
    "threshold_low": 0.3,
    "threshold_high": 0.4,
    "tau": 0.6,
    "ratio_cap": 5.0,
    "coef": 2.0,
}


@pytest.mark.parametrize("choice", [c for c in groups_of(AlgorithmConfig.model_fields["policy_loss"].annotation)
                                    if c.__name__ != "Custom"])  # fmt: skip
def test_parameters_of_a_policy_loss_reach_it(monkeypatch, choice):
    """Together with what every policy loss gets, and the selection where there is one."""
    name = choice.model_fields["name"].default
    parameters = {key: OTHER[key] for key in choice.model_fields if key in OTHER}
    calls = []

    def token_losses(*tensors, **given):
        calls.append((tensors, given))
        return tensors[0] * 0 + 1.0, {"policy/own": MetricValue.mean(1.0, 1)}

    if name in COVARIANCE:
        monkeypatch.setattr(losses, name, token_losses)
    else:
        monkeypatch.setitem(POLICY_LOSSES, name, token_losses)
    extra = {"selected": MASK} if name in COVARIANCE else {}
    given = batch(advantages=ADVANTAGES, old_logprobs=OLD, rollout_logprobs=ROLLOUT)
    given = replace(given, **{key: torch.tensor(value) for key, value in extra.items()})
    config = AlgorithmConfig(policy_loss={"name": name, **parameters}, num_epochs=2)
    result = outputs()
    loss, metrics = policy_loss(config, kl_coef=0)(result, given, DENOMINATORS)
    ((tensors, keywords),) = calls
    assert keywords == parameters
    expected = [result.logprobs, given.old_logprobs, given.advantages, given.loss_mask, given.cu_seqlens]
    expected += [given.selected] if extra else []
    assert len(tensors) == len(expected)
    assert all(a is b for a, b in zip(tensors, expected, strict=True))
    assert loss.item() == pytest.approx(MASK.sum() / 10)
    assert metrics["policy/own"].result() == 1.0


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_weights_multiply_the_policy_loss_and_not_the_kl_term(kl_in):
    weights = np.array([9, 9, 0.5, 2.0, 9, 0.0, 1.5, 9, 9])
    fields = {"advantages": ADVANTAGES, "old_logprobs": OLD, "rollout_logprobs": ROLLOUT, "ref_logprobs": REF}
    config = AlgorithmConfig(policy_loss={"clip_low": 0.1, "clip_high": 0.3}, num_epochs=2, kl_coef=0.7, kl_in=kl_in)
    loss, _ = policy_loss(config, kl_coef=0.7)(outputs(), batch(**fields, importance_weights=weights), DENOMINATORS)
    expected = sum(
        weights[t] * clipped(t, OLD, 0.1, 0.3, 3.0) + (0.7 * k3(LOGPROBS[t], REF[t]) if kl_in == "loss" else 0.0)
        for t in np.flatnonzero(MASK)
    )
    assert loss.item() == pytest.approx(expected / 10, rel=1e-5)


def test_selected_tokens_of_clip_cov_have_no_gradient():
    selected = np.array([0, 0, 1, 0, 0, 0, 1, 0, 0], dtype=bool)
    given = replace(batch(advantages=ADVANTAGES, rollout_logprobs=ROLLOUT), selected=torch.tensor(selected))
    result = outputs()
    loss, metrics = policy_loss(AlgorithmConfig(policy_loss="clip_cov"), kl_coef=0)(result, given, DENOMINATORS)
    loss.backward()
    np.testing.assert_allclose(result.logprobs.grad, np.where(selected, 0.0, -ADVANTAGES / 10), rtol=1e-6)
    assert metrics["policy/selected_fraction"].result() == 0.5


@pytest.mark.parametrize("clip", [0.5, None])
def test_value_loss_equals_a_loop_over_tokens(clip):
    values, old, returns = (RNG.normal(size=9) for _ in range(3))
    scored = torch.tensor(values, dtype=torch.float32, requires_grad=True)
    config = CriticConfig(value_loss={"clip": clip})
    loss_fn = LossSource.of("value", config).make().function
    loss, metrics = loss_fn(TokenOutputs(values=scored), batch(values=old, returns=returns), DENOMINATORS)
    expected, num_clipped = 0.0, 0
    for t in np.flatnonzero(MASK):
        bound = np.inf if clip is None else clip
        near = min(max(values[t], old[t] - bound), old[t] + bound)
        plain, clipped_one = (values[t] - returns[t]) ** 2, (near - returns[t]) ** 2
        expected += max(plain, clipped_one) / 2
        num_clipped += clipped_one > plain
    assert loss.item() == pytest.approx(expected / 10, rel=1e-5)
    assert metrics["critic/clip_fraction"].result() == pytest.approx(num_clipped / MASK.sum())
    loss.backward()
    assert not scored.grad[~torch.tensor(MASK)].any()


# Six sequences; where pairs are compared, neighbours are one. Sequences differ in length and in what is trained.
LENGTHS = [5, 3, 4, 6, 2, 7]
SPLITS = [[[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[4, 5, 0, 1], [2, 3]]]
"""Pairs over micro-batches, in any order."""
SEQUENCES = [
    {
        "mask": (mask := np.arange(length) >= 1 + n % 2),
        "logprobs": -RNG.uniform(0.1, 2.0, length) * mask,
        "ref": -RNG.uniform(0.1, 2.0, length) * mask,
        "values": RNG.normal(size=length),
        "margin": [0.7, 0.0, 1.2, 0.0, 0.0, 0.0][n],
        "label": [1.0, -1.0, -1.0, 1.0, 1.0, -1.0][n],
    }
    for n, length in enumerate(LENGTHS)
]
STEP = Denominators(num_tokens=99, num_sequences=6)


def batch_of(members, reward) -> TokenBatch:
    lengths = [LENGTHS[n] for n in members]
    cells = {name: np.concatenate([SEQUENCES[n][name] for n in members]) for name in ("mask", "ref")}
    return TokenBatch(
        input_ids=torch.zeros(sum(lengths), dtype=torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        loss_mask=torch.tensor(cells["mask"]),
        ref_logprobs=torch.tensor(cells["ref"], dtype=torch.float32),
        rewards=torch.tensor([SEQUENCES[n][reward] for n in members]),
        sample_index=list(members),
    )


def loss_and_gradient(loss_fn, splits, name, reward):
    """The step's loss, the gradient of each sequence, and the merged metrics."""
    total, gradients, metrics = 0.0, {}, []
    for members in splits:
        whole = np.concatenate([SEQUENCES[n][name] for n in members])
        scored = torch.tensor(whole, dtype=torch.float32, requires_grad=True)
        loss, found = loss_fn(TokenOutputs(**{name: scored}), batch_of(members, reward), STEP)
        loss.backward()
        total += loss.item()
        metrics.append(found)
        parts = scored.grad.split([LENGTHS[n] for n in members])
        gradients |= {n: part.tolist() for n, part in zip(members, parts, strict=True)}
    merged = {name: value.result() for name, value in merge_metrics(metrics).items()}
    return total, [gradients[n] for n in range(6)], merged


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def preference_by_hand(name, chosen, rejected, parameters):
    """The loss of a pair from the papers' formulas."""

    def total(side, which):
        return float((side[which] * side["mask"]).sum())

    def mean(side, which):
        return total(side, which) / side["mask"].sum()

    beta = parameters["beta"]
    match name:
        case "dpo":
            gap = sum(s * (total(side, "logprobs") - total(side, "ref")) for s, side in ((1, chosen), (-1, rejected)))
            e = parameters["label_smoothing"]
            return -(1 - e) * log_sigmoid(beta * gap) - e * log_sigmoid(-beta * gap)
        case "ipo":
            gap = sum(s * (mean(side, "logprobs") - mean(side, "ref")) for s, side in ((1, chosen), (-1, rejected)))
            return (gap - 1 / (2 * beta)) ** 2
        case "simpo":
            gap = beta * (mean(chosen, "logprobs") - mean(rejected, "logprobs"))
            return -log_sigmoid(gap - parameters["gamma"])
        case "orpo":
            odds = [mean(s, "logprobs") - math.log(1 - math.exp(mean(s, "logprobs"))) for s in (chosen, rejected)]
            return -mean(chosen, "logprobs") - beta * log_sigmoid(odds[0] - odds[1])


PREFERENCE_PARAMETERS = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.2},
    "ipo": {"beta": 0.4},
    "simpo": {"beta": 1.5, "gamma": 0.7},
    "orpo": {"beta": 0.6},
}


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_preference_losses_equal_a_loop_over_pairs_however_they_are_split(name):
    parameters = PREFERENCE_PARAMETERS[name]
    config = PREFERENCE.validate_python({"name": name, **parameters})
    loss_fn = LossSource.of("preference", config, kl=0.0).make().function
    expected = np.mean([preference_by_hand(name, SEQUENCES[n], SEQUENCES[n + 1], parameters) for n in (0, 2, 4)])
    whole, gradient, metrics = loss_and_gradient(loss_fn, SPLITS[0], "logprobs", "margin")
    assert whole == pytest.approx(expected, rel=1e-5)
    assert any(any(row) for row in gradient)
    for row, sequence in zip(gradient, SEQUENCES, strict=True):
        assert not np.array(row)[~sequence["mask"]].any()
    for splits in SPLITS[1:]:
        found, moved, merged = loss_and_gradient(loss_fn, splits, "logprobs", "margin")
        assert found == pytest.approx(whole, rel=1e-5)
        for a, b in zip(moved, gradient, strict=True):
            assert a == pytest.approx(b, rel=1e-5, abs=1e-8)
        assert merged == pytest.approx(metrics, rel=1e-5)


def test_a_pair_without_reference_logprobs_is_compared_with_nothing():
    """simpo and orpo get none, and would not read them."""
    for name in ("simpo", "orpo"):
        config = PREFERENCE.validate_python({"name": name, **PREFERENCE_PARAMETERS[name]})
        loss_fn = LossSource.of("preference", config, kl=0.0).make().function
        given = batch_of(range(6), "margin")
        scored = torch.tensor(np.concatenate([s["logprobs"] for s in SEQUENCES]), dtype=torch.float32)
        found = [loss_fn(TokenOutputs(logprobs=scored), b, STEP)[0].item() for b in
                 (given, replace(given, ref_logprobs=None))]  # fmt: skip
        assert found[0] == found[1] != 0


@pytest.mark.parametrize("kl", [0.0, 1.5])
def test_kto_equals_a_loop_over_answers_however_they_are_split(kl):
    parameters = {"beta": 0.3, "desirable_weight": 1.25, "undesirable_weight": 0.75}
    config = PREFERENCE.validate_python({"name": "kto", **parameters})
    loss_fn = LossSource.of("preference", config, kl=kl).make().function
    terms = []
    for sequence in SEQUENCES:
        gap = float(((sequence["logprobs"] - sequence["ref"]) * sequence["mask"]).sum())
        if sequence["label"] > 0:
            terms.append(1.25 * (1 - 1 / (1 + math.exp(-0.3 * (gap - kl)))))
        else:
            terms.append(0.75 * (1 - 1 / (1 + math.exp(-0.3 * (kl - gap)))))
    for splits in (*SPLITS, [[n] for n in range(6)]):
        total, _, metrics = loss_and_gradient(loss_fn, splits, "logprobs", "label")
        assert total == pytest.approx(np.mean(terms), rel=1e-5)
    assert "preference/margin" not in metrics


@pytest.mark.parametrize("center_coef", [0.0, 0.3])
def test_reward_model_loss_equals_a_loop_over_pairs_however_they_are_split(center_coef):
    """The score of a sequence is the sum of its outputs, of which all but the last are 0 in a real model."""
    loss_fn = LossSource.of("reward_model", BradleyTerry(center_coef=center_coef)).make().function
    scores = [sequence["values"].sum() for sequence in SEQUENCES]
    expected = np.mean(
        [
            -log_sigmoid(scores[n] - scores[n + 1] - SEQUENCES[n]["margin"])
            + center_coef * (scores[n] + scores[n + 1]) ** 2
            for n in (0, 2, 4)
        ]
    )
    accuracy = np.mean([scores[n] > scores[n + 1] for n in (0, 2, 4)])
    for splits in SPLITS:
        total, gradient, metrics = loss_and_gradient(loss_fn, splits, "values", "margin")
        assert total == pytest.approx(expected, rel=1e-5)
        assert metrics["preference/accuracy"] == pytest.approx(accuracy)
        assert any(any(row) for row in gradient)
