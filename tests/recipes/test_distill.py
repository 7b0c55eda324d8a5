"""Distillation on one rank, with engines of their own."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer
from vision_folders import noise, vision_folder

from shardwise.config import DataError, DistillConfig, EngineConfig, FrozenEngineConfig, ModelConfig
from shardwise.data.synthetic import build_model_folder
from shardwise.recipes.distill import train, validate
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.engines import RemoteEngine
from shardwise.recipes.opened_model import OpenedModel
from shardwise.types import Sample


def config(model, teacher, files, output_dir, **distillation) -> DistillConfig:
    tree = {
        "model": {"path": str(model)},
        "teacher": {"model": {"path": str(teacher)}},
        "data": {"train_files": files, "apply_chat_template": False, "max_sequence_tokens": 64},
        "distillation": distillation,
        "trainer": {
            "output_dir": str(output_dir),
            "batch_size": 2,
            "total_steps": 3,
            "learning_rate": 1e-2,
            "tensorboard": False,
        },
    }
    return DistillConfig.parse(tree, origin="test")


@pytest.fixture
def rows(write_jsonl):
    return write_jsonl("train.jsonl", [{"prompt": f"{n}+{n}=", "response": str(2 * n)} for n in range(5)])


def losses(metrics_file):
    return [json.loads(line)["train/loss"] for line in metrics_file.read_text().splitlines()]


def test_a_model_has_nothing_to_learn_from_itself(group_of_one, model_folder, rows, tmp_path):
    train(config(model_folder, model_folder, rows, tmp_path / "run"), group_of_one)
    assert losses(tmp_path / "run" / "metrics.jsonl")[0] == pytest.approx(0.0, abs=1e-6)


def test_rows_may_not_spell_what_stands_for_images_to_the_teacher(
    group_of_one, model_folder, rows, tmp_path, monkeypatch
):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    build_model_folder(tmp_path / "teacher", tokenizer=tokenizer, hidden_size=32, num_layers=1, seed=1)
    media = {tmp_path / "teacher": [tokenizer.convert_tokens_to_ids("6")], model_folder: []}
    monkeypatch.setattr(OpenedModel, "media_token_ids", property(lambda opened: media[opened.folder]))
    with pytest.raises(DataError, match=r"^train\.jsonl line 4: the text spells '6', by which the model knows a part"):
        train(config(model_folder, tmp_path / "teacher", rows, tmp_path / "run"), group_of_one)


def test_cross_entropy_beside_the_divergence_adds_its_weight(group_of_one, model_folder, rows, tmp_path):
    """Of a model taught by itself the divergence is 0: what is left is the weight times the cross-entropy."""
    train(config(model_folder, model_folder, rows, tmp_path / "one", cross_entropy_coef=1.0), group_of_one)
    group_of_one.call("close")
    train(config(model_folder, model_folder, rows, tmp_path / "half", cross_entropy_coef=0.5), group_of_one)
    one, half = losses(tmp_path / "one" / "metrics.jsonl"), losses(tmp_path / "half" / "metrics.jsonl")
    assert one[0] > 1
    assert half[0] == pytest.approx(0.5 * one[0], rel=1e-5)


def test_terms_of_ones_own_that_sum_to_reverse_kl_make_the_same_run(group_of_one, model_folder, rows, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    build_model_folder(tmp_path / "teacher", tokenizer=tokenizer, hidden_size=32, num_layers=1, seed=1)
    (tmp_path / "rules.py").write_text(
        "def mine(student_logprobs, teacher_logprobs, power=1):\n"
        "    return student_logprobs.exp() ** power * (student_logprobs - teacher_logprobs)\n"
    )
    found = {}
    for name, divergence in (("own", f"{tmp_path / 'rules.py'}:mine"), ("built in", "reverse_kl")):
        train(config(model_folder, tmp_path / "teacher", rows, tmp_path / name, divergence=divergence), group_of_one)
        group_of_one.call("close")
        found[name] = losses(tmp_path / name / "metrics.jsonl")
    assert found["own"] == pytest.approx(found["built in"], rel=1e-4)
    assert found["own"][0] > 1e-3


@pytest.fixture
def seeing(tmp_path, write_jsonl):
    """Reads the losses of a run on rows of which one has an image, with validation on them."""
    vision_folder("qwen3_vl", tmp_path / "student")
    noise((20, 44)).save(tmp_path / "0.png")
    rows = [{"prompt": "<image>Which?", "response": "7", "images": ["0.png"]}, {"prompt": "2+3=", "response": "5"}]

    def run(group, teacher, name="run", rows=rows):
        found = config(tmp_path / "student", teacher, write_jsonl("rows.jsonl", rows), tmp_path / name)
        data = found.data.model_copy(update={"apply_chat_template": True, "validation_files": found.data.train_files})
        trainer = found.trainer.model_copy(update={"validate_every_steps": 1})
        train(found.model_copy(update={"data": data, "trainer": trainer}), group)
        group.call("close")
        metrics = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [(line["train/loss"], line["val/divergence"]) for line in metrics]

    return run


def test_images_are_shown_to_the_student_and_to_the_teacher(group_of_one, seeing, tmp_path):
    """From itself there is nothing to learn, of images neither; from another there is, and less of it later."""
    ((first, held_out), *_) = seeing(group_of_one, tmp_path / "student")
    assert (first, held_out) == pytest.approx((0.0, 0.0), abs=1e-6)
    vision_folder("qwen3_vl", tmp_path / "teacher", seed=1)
    (first, second, third) = seeing(group_of_one, tmp_path / "teacher", "other")
    assert first[0] > second[0] > third[0] > 0
    assert second[0] == pytest.approx(first[1], rel=1e-5)  # of the same rows and weights, without a step between


def test_a_teacher_that_would_be_shown_other_images_is_refused_only_with_images(group_of_one, seeing, tmp_path):
    teacher = shutil.copytree(tmp_path / "student", tmp_path / "teacher")
    path = teacher / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_mean": [0.5, 0.5, 0.5]}))
    with pytest.raises(DataError) as refused:
        seeing(group_of_one, teacher)
    assert str(refused.value).startswith(
        'rows.jsonl line 1: the row has images in its column "images", and teacher.model '
        f"({teacher}) prepares images with image_mean=(0.5, 0.5, 0.5), and the model whose tokens it reads with image_m"
    )
    assert "; give both folders the same file of the image processor, or leave all but text out" in str(refused.value)
    assert len(seeing(group_of_one, teacher, rows=[{"prompt": f"{n}+1=", "response": "5"} for n in range(4)])) == 3


def student_and_teacher(group, cap=4096):
    model, counts = ModelConfig(path="m"), {"num_parameters": 1, "num_trained_parameters": 1, "num_bytes_read": 0}
    student = EngineSource(model=model, layout=EngineConfig())
    teacher = EngineSource(model=model, layout=FrozenEngineConfig(max_tokens_per_micro_batch=cap))
    return (
        RemoteEngine(group=group, role="student", source=student, **counts),
        RemoteEngine(group=group, role="teacher", source=teacher, **counts),
    )


def test_validation_is_the_mean_over_trained_tokens(fake_group):
    group = fake_group(1, divergence=lambda _, batches, *__: [b.loss_mask * b.input_ids * 0.5 for b in batches])
    student, teacher = student_and_teacher(group)
    mask = torch.tensor([False, True, True])
    samples = [Sample(uid=str(n), token_ids=torch.tensor([9, n, 2 * n]), loss_mask=mask) for n in (1, 4)]
    found = validate(student, teacher, samples)["val/divergence"]
    assert found.result() == pytest.approx(0.5 * (1 + 2 + 4 + 8) / 4)
    assert group.calls[0][-2:] == ("student", "teacher")


@pytest.mark.parametrize(("cap", "sizes"), [(64, [6]), (4, [3, 3])])
def test_the_cap_of_the_teacher_limits_the_micro_batches_too(fake_group, cap, sizes):
    sent = []

    def divergence(_, batches, *__):
        sent.extend(len(batch.input_ids) for batch in batches)
        return [torch.zeros(len(batch.input_ids)) for batch in batches]

    student, teacher = student_and_teacher(fake_group(1, divergence=divergence), cap)
    mask = torch.tensor([False, True, True])
    student.divergence([Sample(uid=str(n), token_ids=torch.arange(3), loss_mask=mask) for n in range(2)], teacher)
    assert sent == sizes
