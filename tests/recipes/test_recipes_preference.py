"""Preference training, its reference policy in four modes, and KTO's estimate of the KL divergence."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from vision_folders import vision_folder

from shardwise.config import DataError, PreferenceConfig
from shardwise.data import mismatched
from shardwise.recipes.preference import Reference, kl_of_mismatched, train, validate, with_margin
from shardwise.types import MetricValue, Sample

MODES = {
    "engine": {},
    "adapters": {"engine": {"lora": {"rank": 4}}},
    "before_training": {"reference_logprobs": "before_training"},
    "none": {"loss": "simpo"},
}


def config(**tree) -> PreferenceConfig:
    return PreferenceConfig.parse({"model": {"path": "m"}, "data": {"train_files": "t"}} | tree, origin="test")


@pytest.fixture
def pairs():
    """Two pairs; a sample's tokens are its number."""
    lengths = [5, 3, 4, 6]
    return [
        Sample(
            uid=str(n),
            token_ids=torch.full((length,), n + 1),
            loss_mask=torch.arange(length) >= 2,
            reward=0.5 * (n == 0),
            group=n // 2,
        )
        for n, length in enumerate(lengths)
    ]


def logprobs_of(token_ids, loss_mask, role, with_adapters):
    """Of the policy -0.1 times the token, of the frozen engine -0.2, of the policy without adapters -0.3."""
    factor = {("policy", True): -0.1, ("reference", True): -0.2, ("policy", False): -0.3}[role, with_adapters]
    return torch.where(loss_mask, factor * token_ids, 0.0)


def score(rank, batches, role, with_adapters):
    return [logprobs_of(batch.input_ids, batch.loss_mask, role, with_adapters) for batch in batches]


@pytest.fixture
def policy(fake_group, remote):
    answers = {"build_engine": lambda rank, *_: (9, 0, 50 + rank), "load_initial_weights": lambda *_: 60}
    return remote(fake_group(2, score=score, **answers))


@pytest.mark.parametrize(
    ("mode", "before", "each_step"),
    [
        ("engine", None, ("reference", True)),
        ("adapters", None, ("policy", False)),
        ("before_training", ("policy", True), None),
        ("none", None, None),
    ],
)
def test_reference_logprobs_come_from_where_the_mode_says_and_when(policy, pairs, mode, before, each_step):
    reference = Reference(policy, config(**MODES[mode]))
    found = {"before": reference.score_before_training(pairs), "step": reference.score(pairs)}
    for when, source in (("before", before), ("step", each_step)):
        for sample, scored in zip(pairs, found[when], strict=True):
            assert scored.token_ids is sample.token_ids
            assert (scored.reward, scored.group) == (sample.reward, sample.group)
            if source is None:
                assert scored.ref_logprobs is None
            else:
                torch.testing.assert_close(
                    scored.ref_logprobs, logprobs_of(sample.token_ids, sample.loss_mask, *source)
                )
    built = [call for call in policy.group.calls if call[0] == "build_engine"]
    assert [engine.role for engine in reference.engines] == (["reference"] if mode == "engine" else [])
    assert len(built) == len(reference.engines)


@pytest.mark.parametrize("mode", MODES)
def test_only_a_policy_that_is_asked_before_training_has_its_initial_weights_then(policy, pairs, mode):
    policy.has_weights = False
    Reference(policy, config(**MODES[mode])).score_before_training(pairs)
    assert policy.has_weights == (mode == "before_training")


def test_logprobs_are_taken_before_training_in_parts(policy, pairs, monkeypatch):
    reference = Reference(policy, config(reference_logprobs="before_training"))
    expected = [sample.ref_logprobs for sample in reference.score_before_training(pairs)]
    policy.group.calls.clear()
    monkeypatch.setattr("shardwise.recipes.preference.SCORED_AT_A_TIME", 3)
    found = reference.score_before_training(pairs)
    assert [name for name, *_ in policy.group.calls].count("score") == 2
    for sample, logprobs in zip(found, expected, strict=True):
        torch.testing.assert_close(sample.ref_logprobs, logprobs)


def test_logprobs_taken_before_training_stay_when_the_policy_has_moved(policy, pairs):
    reference = Reference(policy, config(reference_logprobs="before_training"))
    first = reference.score_before_training(pairs)
    policy.group.calls.clear()
    assert reference.score(first) == first
    assert policy.group.calls == []


@pytest.mark.parametrize("given", [None, {"max_tokens_per_micro_batch": 5000, "param_dtype": "bfloat16"}])
def test_the_reference_engine_is_the_policys_model_frozen_at_temperature_one(policy, given):
    settings = config(**({} if given is None else {"reference": given}), engine={"ulysses_size": 2})
    (engine,) = Reference(policy, settings).engines
    (call,) = policy.group.calls
    _, role, sent = call  # without an optimizer
    source = json.loads(sent)
    assert (role, source["model"]["path"], source["head"], source["temperature"]) == ("reference", "m", "logprobs", 1.0)
    layout = source["layout"]
    assert layout["strategy"] == "fsdp2_infer"
    assert layout["ulysses_size"] == 2  # the policy's, where the reference does not say
    assert layout["param_dtype"] == ("float32" if given is None else "bfloat16")
    assert engine.num_bytes_read == 51


@pytest.mark.parametrize("factor", [1.0, -1.0])
def test_kl_of_mismatched_is_the_mean_log_ratio_per_sequence_and_never_negative(fake_group, remote, pairs, factor):
    """Each prompt has the answer of the next: policy minus reference, summed over the answer."""

    def scores(rank, batches, role, with_adapters):
        scale = {"policy": 0.3 * factor, "reference": 0.1 * factor}[role]
        return [torch.where(batch.loss_mask, scale * batch.input_ids, 0.0) for batch in batches]

    group = fake_group(1, score=scores, build_engine=lambda *_: (9, 0, 0))
    settings = config(loss="kto", data={"train_files": "t", "max_sequence_tokens": 5}, trainer={"batch_size": 4})
    policy = remote(group)
    found = kl_of_mismatched(pairs, policy, Reference(policy, settings), settings)
    # Prompts are two tokens long; the answers of the next samples have 1, 2, 4 (cut to 3) and 3 tokens.
    ratios = [0.2 * factor * (n + 1) * length for n, length in ((1, 1), (2, 2), (3, 3), (0, 3))]
    assert found == pytest.approx(max(0.0, sum(ratios) / 4))
    sent = [batch for call in group.calls if call[0] == "score" for shard in call[1] for batch in shard]
    expected = sorted(s.token_ids.tolist() for s in mismatched(pairs, max_tokens=5))
    for role_batches in (sent[: len(sent) // 2], sent[len(sent) // 2 :]):
        rows = [row.tolist() for b in role_batches for row in b.input_ids.split(b.cu_seqlens.diff().tolist())]
        assert sorted(rows) == expected


@pytest.mark.parametrize("mode", ["engine", "none"])
def test_validation_is_the_mean_loss_of_the_pairs(policy, pairs, mode):
    settings = config(**MODES[mode])
    reference = Reference(policy, settings)
    found = validate(policy, reference, reference.score(pairs), settings)
    found = {name: value.result() for name, value in found.items()}
    num_trained = [3, 1, 2, 4]
    losses, margins = [], []
    for n in (0, 2):
        (chosen, rejected) = (-0.1 * (k + 1) * num_trained[k] for k in (n, n + 1))
        if mode == "engine":  # the reference's logprobs are twice the policy's
            margins.append(0.1 * ((chosen - 2 * chosen) - (rejected - 2 * rejected)))
            losses.append(math.log1p(math.exp(-margins[-1])))
        else:
            margins.append(2.0 * (chosen / num_trained[n] - rejected / num_trained[n + 1]))
            losses.append(math.log1p(math.exp(-(margins[-1] - 1.0))))
    assert found["val/loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["val/margin"] == pytest.approx(np.mean(margins), rel=1e-5)
    assert found["val/accuracy"] == np.mean([margin > 0 for margin in margins])


def test_validation_of_kto_is_the_mean_over_answers(policy, pairs):
    settings = config(loss="kto")
    labelled = [Sample(uid=s.uid, token_ids=s.token_ids, loss_mask=s.loss_mask, reward=r) for s, r in
                zip(pairs, (1.0, -1.0, -1.0, 1.0), strict=True)]  # fmt: skip
    reference = Reference(policy, settings)
    found = validate(policy, reference, reference.score(labelled), settings)
    kl = kl_of_mismatched(labelled, policy, reference, settings)
    assert kl > 0
    gaps = [0.1 * (n + 1) * length for n, length in enumerate((3, 1, 2, 4))]
    signs = (1, -1, -1, 1)
    expected = [1 - 1 / (1 + math.exp(-0.1 * (gap - kl) * sign)) for gap, sign in zip(gaps, signs, strict=True)]
    assert found["val/loss"].result() == pytest.approx(np.mean(expected), rel=1e-5)
    assert found["val/loss"].count == 4


ROWS = [{"prompt": f"{n}+3=", "chosen": str(n + 3), "rejected": "9" * (1 + n % 3)} for n in range(4)]
LABELLED = [{"prompt": f"{n}+3=", "response": str(n + 3 * (n % 2)), "label": bool(n % 2)} for n in range(4)]


@pytest.fixture
def run(group_of_one, model_folder, write_jsonl, tmp_path):
    """metrics.jsonl of a run over four rows that are held out too, all of them in every batch."""

    def make(rows, *, steps=3, **tree):
        file = write_jsonl("rows.jsonl", rows)
        whole = {
            "model": {"path": str(model_folder)},
            "data": {"train_files": file, "validation_files": file, "apply_chat_template": False,
                     "max_sequence_tokens": 24},
            "trainer": {"output_dir": str(tmp_path / "run"), "resume": "never", "total_steps": steps, "batch_size": 4,
                        "tensorboard": False, "learning_rate": 0.01, "validate_every_steps": 1},
        } | tree  # fmt: skip
        whole["engine"] = {"max_tokens_per_micro_batch": 48} | whole.get("engine", {})
        train(PreferenceConfig.parse(whole, origin="test"), group_of_one)
        group_of_one.call("close")
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return make


def test_a_reference_engine_and_logprobs_taken_before_training_are_the_same_reference(run):
    """The first loss is that of a policy which is its own reference, log 2; from then on it falls."""
    found = [run(ROWS, **tree) for tree in (MODES["engine"], MODES["before_training"])]
    for metrics in found:
        losses = [row["train/loss"] for row in metrics]
        assert losses[0] == pytest.approx(math.log(2), rel=1e-5)
        assert losses[2] < losses[1] < losses[0]
        assert metrics[0]["data/num_identical"] == 0
        for before, after in itertools.pairwise(metrics):
            assert before["val/loss"] == pytest.approx(after["train/loss"], rel=1e-4)
            assert before["val/margin"] == pytest.approx(after["preference/margin"], rel=1e-3, abs=1e-6)
    for one, other in zip(*found, strict=True):
        for name in ("train/loss", "train/grad_norm", "val/loss", "preference/margin"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def test_the_policy_without_its_adapters_is_the_reference(run):
    metrics = run(ROWS, **MODES["adapters"])
    losses = [row["train/loss"] for row in metrics]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-5)
    assert losses[2] < losses[0]
    assert metrics[0]["val/loss"] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_losses_without_a_reference_learn(run, loss):
    metrics = run(ROWS, loss=loss)
    assert metrics[2]["train/loss"] < metrics[0]["train/loss"]
    assert metrics[0]["val/loss"] == pytest.approx(metrics[1]["train/loss"], rel=1e-4)


def test_kto_begins_at_one_half_and_learns(run):
    """Policy and reference agree at first: every answer costs 1 - sigmoid(0)."""
    metrics = run(LABELLED, loss={"name": "kto", "beta": 0.5}, steps=4)
    assert metrics[0]["train/loss"] == pytest.approx(0.5, rel=1e-5)
    assert metrics[3]["train/loss"] < 0.5
    assert (metrics[0]["data/num_rows"], metrics[0]["data/num_desirable"]) == (4, 2)


@pytest.mark.parametrize(
    "tree",
    [MODES["engine"], MODES["before_training"], {"loss": {"name": "kto", "beta": 0.5}}],
    ids=["engine", "before_training", "kto"],
)
def test_rows_with_images_are_learnt_and_the_reference_sees_the_same_images(run, tmp_path, tree):
    """All questions are alike, and only the image tells which answer is chosen. A reference that saw others would not
    agree with the policy before its first step."""
    vision_folder("qwen3_vl", tmp_path / "vl")
    rows = []
    for number, colour in enumerate(("black", "white")):
        Image.new("RGB", (16, 16), colour).save(tmp_path / f"{number}.png")
        answers = {"chosen": str(number), "rejected": str(1 - number), "response": "1", "label": bool(number)}
        rows += [{"prompt": "<image>Which?", "images": [f"{number}.png"]} | answers, {"prompt": "2+3="} | answers]
    data = {"train_files": str(tmp_path / "rows.jsonl"), "validation_files": str(tmp_path / "rows.jsonl")}
    data["max_sequence_tokens"] = 48
    metrics = run(
        rows, model={"path": str(tmp_path / "vl")}, data=data, engine={"max_tokens_per_micro_batch": 96}, **tree
    )
    losses = [row["train/loss"] for row in metrics]
    assert losses[0] == pytest.approx(0.5 if "loss" in tree else math.log(2), rel=1e-5)
    assert losses[2] < losses[0]
    if "loss" not in tree:
        for before, after in itertools.pairwise(metrics):
            assert before["val/loss"] == pytest.approx(after["train/loss"], rel=1e-4)


def test_kto_needs_two_rows_that_are_held_out(run, write_jsonl):
    """Its KL divergence is of prompts with the answers to others."""
    file = write_jsonl("labelled.jsonl", LABELLED)
    data = {"train_files": file, "validation_files": file, "max_validation_rows": 1, "apply_chat_template": False,
            "max_sequence_tokens": 24}  # fmt: skip
    with pytest.raises(DataError, match=r"data.validation_files leave one row, and loss=kto estimates .* at least 2"):
        run(LABELLED, loss="kto", data=data)


OWN = """
import torch
from shardwise.algorithms import dpo, kto

def mine(sums, ref_sums, lengths, beta=0.1):
    return dpo(sums, ref_sums, lengths, beta=beta, label_smoothing=0.0)

def labelled(sums, ref_sums, lengths, desirable, kl, beta=0.5):
    assert len(lengths) == len(desirable) == len(sums) and kl >= 0
    return kto(sums, ref_sums, desirable, kl, beta=beta, desirable_weight=1.0, undesirable_weight=1.0)

def alone(sums, ref_sums, lengths, desirable, kl):
    assert kl == 0 and not ref_sums.any()
    return torch.where(desirable, -sums, sums) / lengths, {}

def without_rewards(sums, ref_sums, lengths):
    return (sums[:, 1] - sums[:, 0]) / lengths.sum(1) + ref_sums.sum(1), {}
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "rules.py").write_text(OWN)
    return lambda name, **keys: {"name": "custom", "function": f"{tmp_path / 'rules.py'}:{name}", **keys}


def test_a_loss_of_ones_own_that_equals_dpo_makes_the_same_run(run, own):
    found, expected = (run(ROWS, loss=loss) for loss in (own("mine"), "dpo"))
    assert found == expected
    other = run(ROWS, loss=own("mine", parameters={"beta": 0.5}))
    assert other[1]["train/loss"] != expected[1]["train/loss"]


def test_a_loss_of_ones_own_on_labelled_answers_that_equals_kto_makes_the_same_run(run, own):
    found, expected = (
        run(LABELLED, loss=loss) for loss in (own("labelled", is_paired=False), {"name": "kto", "beta": 0.5})
    )
    assert found == expected
    metrics = run(LABELLED, loss=own("alone", is_paired=False, uses_reference=False))
    assert metrics[2]["train/loss"] < metrics[0]["train/loss"]


def test_a_loss_of_ones_own_without_a_reference_builds_none_and_needs_no_metrics(run, own):
    metrics = run(ROWS, loss=own("without_rewards", uses_reference=False))
    assert metrics[2]["train/loss"] < metrics[0]["train/loss"]
    assert metrics[0]["val/loss"] == pytest.approx(metrics[1]["train/loss"], rel=1e-4)
    assert not any(name.startswith("preference/") for name in metrics[0])


def test_a_margin_needs_both_kinds_of_answers():
    both = {
        "preference/chosen_reward": MetricValue.mean(4.0, 2),
        "preference/rejected_reward": MetricValue.mean(1.0, 2),
    }
    assert with_margin(both)["preference/margin"].result() == 1.5
    assert "preference/margin" not in with_margin(both | {"preference/rejected_reward": MetricValue.mean(0.0, 0)})
    assert with_margin({}) == {}
