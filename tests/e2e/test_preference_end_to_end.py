"""`shardwise preference`, `reward-model` and `distill` as a user runs them."""

import json
from itertools import product

import pytest
import torch
from runs import granite_folder, keep_first_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.preference_problems import preference_problems


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    files = preference_problems(tmp_path_factory.mktemp("pairs"), seed=0, num_held_out=32)
    for file in (files.pairs_train, files.labelled_train):
        keep_first_rows(file)
    return files


def options(assets, train, held_out, output_dir, **extra) -> list[str]:
    return [
        f"model.path={assets.model}",
        f"data.train_files={train}",
        f"data.validation_files={held_out}",
        "data.max_sequence_tokens=64",
        "engine.max_tokens_per_micro_batch=256",
        "trainer.batch_size=16",
        "trainer.learning_rate=3e-3",
        "trainer.total_steps=6",
        "trainer.validate_every_steps=3",
        "trainer.tensorboard=false",
        f"trainer.output_dir={output_dir}",
        *(f"{key}={json.dumps(value)}" for key, value in extra.items()),
    ]


@pytest.mark.parametrize(
    "loss", ["dpo", *(pytest.param(name, marks=pytest.mark.full) for name in ("ipo", "simpo")), "orpo", "kto"]
)
def test_the_loss_on_held_out_rows_falls(assets, files, command, metrics_of, tmp_path, loss):
    sides = ("labelled_train", "labelled_validation") if loss == "kto" else ("pairs_train", "pairs_validation")
    train, held_out = (getattr(files, name) for name in sides)
    arguments = options(assets, train, held_out, tmp_path / "run", loss=loss)
    slowly = ("trainer.learning_rate=1e-3", "trainer.total_steps=24", "trainer.validate_every_steps=4")
    done = command("preference", *arguments, *slowly)
    assert done.code == 0, done.err
    rows = [row for row in metrics_of(tmp_path / "run") if "val/loss" in row]
    assert rows[-1]["val/loss"] < rows[0]["val/loss"]
    assert rows[-1]["val/margin"] > 0


REFERENCES = {
    "an engine of its own": {},
    "scored before training": {"reference_logprobs": "before_training"},
    "in another layout": {"reference": {"max_tokens_per_micro_batch": 512}},
}


def test_every_way_to_the_reference_gives_the_same_steps(assets, files, command, metrics_of, tmp_path):
    losses = []
    for name, extra in REFERENCES.items():
        done = command(
            "preference", *options(assets, files.pairs_train, files.pairs_validation, tmp_path / name, **extra)
        )
        assert done.code == 0, done.err
        losses.append([row["train/loss"] for row in metrics_of(tmp_path / name)])
    assert losses[0][0] == pytest.approx(0.6931472, abs=1e-5)  # log 2: the policy still is the reference
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-5)


LAYOUTS = {
    "fsdp": ([], "engine.ulysses_size=1"),
    "ulysses": ([], "engine.ulysses_size=2"),
    "lora": (["engine.lora.rank=4"], "engine.ulysses_size=1"),
}
COVERING = {("preference", "ulysses"), ("reward-model", "fsdp")}


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        pytest.param(*cell, marks=() if cell in COVERING else pytest.mark.full)
        for cell in product(("preference", "reward-model"), LAYOUTS)
    ],
)
def test_two_ranks_make_the_same_steps_as_one(assets, files, command, job, metrics_of, tmp_path, recipe, name):
    shared, layout = LAYOUTS[name]
    one = command(recipe, *options(assets, files.pairs_train, files.pairs_validation, tmp_path / "one"), *shared)
    arguments = options(assets, files.pairs_train, files.pairs_validation, tmp_path / "two")
    two = job(2, recipe, *arguments, *shared, layout)
    assert (one.code, two.code) == (0, 0), one.err + two.err
    losses = [row["train/loss"] for row in metrics_of(tmp_path / "one")]
    assert len(set(losses)) > 1
    if recipe == "preference":  # the policy still is the reference; adapters are those switched off
        assert losses[0] == pytest.approx(0.6931472, abs=1e-5)
    for left, right in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two"), strict=True):
        compared = {"train/loss", "train/grad_norm", "preference/margin", "val/accuracy"} & left.keys()
        assert len(compared) >= 2
        for name in compared:
            assert left[name] == pytest.approx(right[name], abs=1e-4), name


@pytest.fixture(scope="module")
def reward_model(assets, files, job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward") / "run"
    arguments = options(assets, files.pairs_train, files.pairs_validation, folder, **{"loss.center_coef": 0.01})
    done = job(2, "reward-model", *arguments)
    assert done.code == 0, done.err
    return folder


def test_a_reward_model_learns_and_loads_as_a_sequence_classifier(reward_model, files, metrics_of):
    rows = metrics_of(reward_model)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    folder = reward_model / "checkpoints" / "step_6" / "hf"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    right = 0
    pairs = [json.loads(line) for line in files.pairs_validation.read_text().splitlines()]
    for pair in pairs:
        scores = []
        for side in ("chosen", "rejected"):
            messages = [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair[side]}]
            ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
            with torch.no_grad():
                scores.append(float(model(ids).logits))
        right += scores[0] > scores[1]
    assert rows[-1]["val/accuracy"] == pytest.approx(right / len(pairs))


@pytest.mark.parametrize("ulysses_size", [1, 2])
def test_a_reward_model_judges_completions(assets, reward_model, job, metrics_of, tmp_path, ulysses_size):
    judge_completions(assets, reward_model, job, metrics_of, tmp_path, ulysses_size)


def judge_completions(assets, reward_model, job, metrics_of, tmp_path, ulysses_size):
    """In reinforcement learning, with the scores that transformers gives."""
    layout = {"ulysses_size": ulysses_size}
    model = {"type": "model", "classifier": {"path": str(reward_model)}, "engine": layout, "weight": 2.0}
    entries = [model, assets.reward]
    arguments = [
        f"model.path={assets.model}",
        f"data.train_files={assets.parquet}",
        "data.max_prompt_tokens=40",
        "rollout.num_prompts=2",
        "rollout.group_size=3",
        "rollout.max_response_tokens=8",
        f"reward.functions={json.dumps(entries)}",
        "trainer.total_steps=1",
        "trainer.tensorboard=false",
        f"trainer.output_dir={tmp_path / 'run'}",
    ]
    done = job(ulysses_size, "rl", *arguments)
    assert done.code == 0, done.err
    (row,) = metrics_of(tmp_path / "run")
    parts = 2 * row["reward_part/reward_model"] + row["reward_part/compute_score"]
    assert row["reward/mean"] == pytest.approx(parts, abs=1e-5)
    folder = reward_model / "checkpoints" / "step_6" / "hf"
    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for sample in map(json.loads, (tmp_path / "run" / "samples.jsonl").read_text().splitlines()):
        number = int(sample["uid"].rsplit(" ", 1)[1])
        messages = [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": f"{number}+{number}="},
            {"role": "assistant", "content": sample["completion"]},
        ]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            expected = float(model(ids).logits)
        assert sample["reward_parts"]["reward_model"] == pytest.approx(expected, abs=1e-4)


def test_a_reward_model_of_a_family_without_such_a_class_learns_and_judges(
    assets, files, command, job, metrics_of, tmp_path
):
    one_batch = tmp_path / "pairs.jsonl"
    one_batch.write_text("\n".join(files.pairs_train.read_text().splitlines()[:16]))
    arguments = options(assets, one_batch, files.pairs_validation, tmp_path / "reward_model")
    done = command("reward-model", *arguments, f"model.path={granite_folder(assets, tmp_path / 'granite')}")
    assert done.code == 0, done.err
    first, *_, last = metrics_of(tmp_path / "reward_model")
    assert last["train/loss"] < 0.8 * first["train/loss"]
    config = json.loads((tmp_path / "reward_model/checkpoints/step_6/hf/config.json").read_text())
    assert config["architectures"] == ["GraniteForSequenceClassification"]
    judge_completions(assets, tmp_path / "reward_model", job, metrics_of, tmp_path, 1)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jensen_shannon"])
def test_a_student_comes_closer_to_its_teacher(assets, command, metrics_of, tmp_path, divergence):
    sft = ["trainer.total_steps=8", "trainer.learning_rate=1e-2", "data.max_sequence_tokens=64"]
    common = [f"model.path={assets.model}", f"data.train_files={assets.sft}", "trainer.tensorboard=false"]
    assert command("sft", *common, *sft, f"trainer.output_dir={tmp_path / 'teacher'}").code == 0
    done = command(
        "distill",
        *common,
        f"data.validation_files={assets.sft}",
        "data.max_validation_rows=32",
        "data.max_sequence_tokens=64",
        f"teacher.model.path={tmp_path / 'teacher'}",
        f"distillation.divergence={divergence}",
        "trainer.total_steps=8",
        "trainer.learning_rate=1e-2",
        "trainer.validate_every_steps=4",
        f"trainer.output_dir={tmp_path / 'student'}",
    )
    assert done.code == 0, done.err
    rows = metrics_of(tmp_path / "student")
    assert rows[-1]["val/divergence"] < 0.7 * rows[0]["train/divergence"]
