"""What a run of reinforcement learning refuses, and what its models let it draw."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer
from vision_folders import noise, vision_folder
from vision_samples import reference_logprobs

from shardwise.config import ConfigError, DataError, ModelConfig, RLConfig, SourceTeacherConfig
from shardwise.data import ImageReader
from shardwise.recipes import opened_model, rl
from shardwise.recipes.learner import Learner
from shardwise.recipes.rl import require_teachers, train

BESIDE = {
    "critic": lambda path: {"critic": {"model": {"path": path}}, "algorithm": {"advantage": "gae"}},
    "teacher": lambda path: {"teachers": [{"model": {"path": path}}], "algorithm": {"advantage": "distill"}},
}


def run_with(media_folder, tmp_path, name, files, **rollout):
    """The config of a run with one model beside the policy."""
    tree = {
        "model": {"path": media_folder("policy")},
        "data": {
            "train_files": files,
            "max_prompt_tokens": 16,
            "apply_chat_template": False,
            "ground_truth_column": "a",
        },
        "reward": {"functions": f"{tmp_path / 'rules.py'}:score"},
        "engine": {"max_tokens_per_micro_batch": 64},
        "rollout": {"num_prompts": 1, "max_response_tokens": 8} | rollout,
        "trainer": {"total_steps": 1, "output_dir": str(tmp_path / "run")},
    }
    return RLConfig.parse(tree | BESIDE[name](media_folder(name)), origin="test")


@pytest.mark.parametrize(("name", "spelt"), [("critic", "6"), ("teacher", "7"), ("critic", "1")])
def test_rows_may_not_spell_what_stands_for_images_to_a_model_that_reads_them(
    fake_group, media_folder, write_jsonl, tmp_path, name, spelt
):
    files = write_jsonl("rows.jsonl", [{"prompt": f"2+{spelt}=", "a": "0"}])
    group = fake_group(1)
    with pytest.raises(DataError, match=f"^rows.jsonl line 1: the text spells '{spelt}', by which the model knows"):
        train(run_with(media_folder, tmp_path, name, files), group)
    assert "build_engine" not in group.methods


def run_on_pictures(tmp_path, rows, **more):
    """The config of a step on rows with images, of one process."""
    tree = {
        "model": {"path": str(tmp_path / "policy")},
        "data": {"train_files": rows, "max_prompt_tokens": 64},
        "engine": {"max_tokens_per_micro_batch": 128},
        "rollout": {"num_prompts": 2, "group_size": 2, "max_response_tokens": 5, "probe_every_syncs": 0},
        "trainer": {"total_steps": 1, "output_dir": str(tmp_path / "run")},
    }
    return RLConfig.parse(tree | more, origin="test")


@pytest.fixture
def pictures(tmp_path, write_jsonl):
    """A file of two rows, of which one has an image."""
    noise((20, 44)).save(tmp_path / "0.png")
    rows = [{"prompt": "<image>Which?", "images": ["0.png"]}, {"prompt": "2+3="}]
    return write_jsonl("pictures.jsonl", [row | {"reward_model": {"ground_truth": "5"}} for row in rows])


@pytest.mark.parametrize(
    "family", ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.full) for name in ("mistral3", "gemma3"))]
)
def test_a_teacher_sees_the_images_of_the_prompts_as_in_transformers(
    group_of_one, pictures, tmp_path, monkeypatch, family
):
    vision_folder(family, tmp_path / "policy")
    teacher = vision_folder(family, tmp_path / "teacher", seed=1)
    found, score = [], Learner._teacher_logprobs

    def spy(self, samples, rollout):
        found.extend(zip(samples, score(self, samples, rollout), strict=True))
        return [logprobs for _, logprobs in found]

    monkeypatch.setattr(Learner, "_teacher_logprobs", spy)
    teachers = [{"model": {"path": str(tmp_path / "teacher")}}]
    train(run_on_pictures(tmp_path, pictures, teachers=teachers, algorithm={"advantage": "distill"}), group_of_one)
    reader = ImageReader.load(tmp_path / "teacher")
    assert sorted(len(sample.image_refs) for sample, _ in found) == [0, 0, 1, 1]
    for sample, logprobs in found:
        seen = replace(sample, images=reader.read(sample.image_refs)) if sample.image_refs else sample
        with torch.no_grad():
            torch.testing.assert_close(logprobs, reference_logprobs(teacher, seen), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["critic", "teacher"])
def test_images_are_refused_that_a_model_beside_the_policy_would_be_shown_otherwise(
    fake_group, pictures, tmp_path, name
):
    vision_folder("qwen3_vl", tmp_path / "policy")
    other = shutil.copytree(tmp_path / "policy", tmp_path / name)
    (other / "preprocessor_config.json").unlink()
    beside, key = BESIDE[name](str(other)), {"critic": "critic", "teacher": r"teachers\.0"}[name]
    group = fake_group(1)
    with pytest.raises(DataError, match=rf"line 1: the row has images .*, and {key}\.model \({other}\) sees no images"):
        train(run_on_pictures(tmp_path, pictures, reward={"functions": "a:b"}, **beside), group)
    assert "build_engine" not in group.methods


class Stop(Exception):
    pass


@pytest.mark.parametrize(("name", "banned"), [("critic", "6"), ("teacher", "7")])
def test_what_stands_for_images_to_a_model_beside_the_policy_is_neither_drawn_nor_brought_in(
    fake_group, media_folder, write_jsonl, tmp_path, monkeypatch, name, banned
):
    """Each model is media_folder once."""
    (tmp_path / "rules.py").write_text("def score(**_): return 0.0\n")
    found, paths, open_folder = {}, [], opened_model.open_model

    def rollouter(*_, media_token_ids, **__):
        found["media"] = set(media_token_ids)
        raise Stop

    def open_model(config):
        paths.append(config.path)
        return open_folder(config)

    for module in (rl, opened_model):
        monkeypatch.setattr(module, "open_model", open_model)
    monkeypatch.setattr(rl, "Rollouter", rollouter)
    group = fake_group(1, build_engine=lambda *_: (9, 9, 9))
    files = write_jsonl("rows.jsonl", [{"prompt": "2+3=", "a": "0"}])
    with pytest.raises(Stop):
        train(run_with(media_folder, tmp_path, name, files, bad_token_ids=[3]), group)
    ids = AutoTokenizer.from_pretrained(media_folder("policy")).convert_tokens_to_ids
    assert found["media"] == {ids("1"), ids(banned)}
    (sent,) = (json.loads(call[2]) for call in group.calls if call[0] == "build_rollout")
    assert sent["bad_token_ids"] == [3, ids(banned)]  # engines ban those of the policy themselves
    assert paths == [media_folder("policy"), media_folder(name)]


def teachers(*sources):
    return [SourceTeacherConfig(model=ModelConfig(path="t"), data_source=source) for source in sources]


@pytest.mark.parametrize(
    ("given", "sources"),
    [((), "ab"), (("a", "b"), "aba"), (("a", None), "abc"), ((None,), "ab")],
)
def test_teachers_that_cover_the_rows_pass(given, sources):
    require_teachers(teachers(*given), list(sources))


@pytest.mark.parametrize(
    ("given", "sources", "message"),
    [
        (
            ("a",),
            "abca",
            "teachers have the data_source a, but there are training rows from b, c; add a teacher for them, or one "
            "without data_source, which teaches all others",
        ),
        (
            ("a", "z", None),
            "ab",
            "the teacher with data_source=z has no training rows to teach, which are from a, b; remove it",
        ),
        (
            ("a", "b", None),
            "ab",
            "the teacher with data_source=null has no training rows to teach, which are from a, b; remove it",
        ),
    ],
)
def test_rows_without_a_teacher_and_teachers_without_rows_are_named(given, sources, message):
    with pytest.raises(ConfigError) as error:
        require_teachers(teachers(*given), list(sources))
    assert str(error.value) == message
