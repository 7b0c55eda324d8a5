"""Reward models as engines: what they are given, and what becomes of their scores."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer
from vision_folders import noise, vision_folder
from vision_samples import reference_logits

from shardwise.config import (
    EngineConfig,
    FrozenEngineConfig,
    ModelConfig,
    ModelError,
    OptimizerConfig,
    PromptDataConfig,
    RewardConfig,
    RLConfig,
    SupervisedDataConfig,
)
from shardwise.data import ImageReader, Vision, load_tokenizer, prompt_examples, supervised_samples
from shardwise.data.images import file_of
from shardwise.engine import TrainEngine
from shardwise.engine.model_classes import AUTO_CLASSES
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.engines import RemoteEngine
from shardwise.recipes.opened_model import OpenedModel
from shardwise.recipes.reward_engines import ModelScorer, build_reward_engines
from shardwise.recipes.rl import train
from shardwise.rewards import RewardJob


def job(prompt, completion, **options) -> RewardJob:
    return RewardJob(uid=prompt, data_source="", prompt=prompt, solution_str=completion, ground_truth=None, **options)


@pytest.fixture
def scorer(fake_group, model_folder):
    """Whose score of a sequence is its number of tokens, at the last one."""

    def score(_, batches, *__):
        scores = []
        for batch in batches:
            values = torch.zeros(len(batch.input_ids))
            values[batch.cu_seqlens[1:].long() - 1] = batch.cu_seqlens.diff().float()
            scores.append(values)
        return scores

    model = ModelConfig(path=str(model_folder))
    engine = RemoteEngine(
        group=fake_group(2, score=score),
        role="reward r",
        source=EngineSource(model=model, layout=FrozenEngineConfig(max_tokens_per_micro_batch=24)),
        num_parameters=1,
        num_trained_parameters=0,
        num_bytes_read=0,
    )
    return ModelScorer(engine, load_tokenizer(model), 96)


def with_room(engine, num_tokens):
    layout = FrozenEngineConfig(max_tokens_per_micro_batch=num_tokens)
    return replace(engine, source=engine.source.model_copy(update={"layout": layout}))


def test_a_conversation_is_rendered_with_the_reward_models_own_template(scorer, model_folder):
    tokenizer = load_tokenizer(ModelConfig(path=str(model_folder)))
    messages = [{"role": "user", "content": "2+2="}]
    expected = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "4"}], return_dict=True)
    ((place, answer),) = scorer.score([job("<rendered by another>", "4", messages=messages)])
    assert (place, answer.score, answer.failure) == (0, len(expected["input_ids"]), None)


def test_plain_text_is_scored_as_it_is(scorer, model_folder):
    tokenizer = load_tokenizer(ModelConfig(path=str(model_folder)))
    ((_, answer),) = scorer.score([job("2+2=", "4")])
    assert answer.score == len(tokenizer("2+2=4")["input_ids"]) + 1  # and the end of the text


def test_scores_come_back_by_place_and_what_is_too_long_fails(scorer):
    jobs = [job("1", "2"), job("1", "2" * 40), job("1+1", "22")]
    answers = dict(scorer.score(jobs))
    assert answers[2].score > answers[0].score > 0
    assert "tokens, more than the 24 of engine.max_tokens_per_micro_batch and the reward model's" in answers[1].failure


def test_the_models_context_is_a_limit_too(scorer):
    short = ModelScorer(scorer.engine, scorer._tokenizer, 10)
    ((_, answer),) = short.score([job("1+1+1", "2222222")])
    assert "more than the 10 of" in answer.failure


def test_a_text_that_spells_what_stands_for_images_fails_and_the_others_are_scored(scorer):
    """The policy may have written it: the run goes on."""
    media = scorer._tokenizer.convert_tokens_to_ids("7")
    seeing = ModelScorer(scorer.engine, scorer._tokenizer, 96, [media])
    answers = dict(seeing.score([job("1+1=", "7"), job("1+1=", "2")]))
    assert answers[0].failure == (
        "the text spells '7', by which the reward model knows an image or a video, and is shown none"
    )
    assert answers[1].score == dict(scorer.score([job("1+1=", "2")]))[0].score


def test_a_reward_model_that_is_built_refuses_what_stands_for_images_to_it(fake_group, model_folder, monkeypatch):
    media = load_tokenizer(ModelConfig(path=str(model_folder))).convert_tokens_to_ids("7")
    monkeypatch.setattr(OpenedModel, "media_token_ids", [media])
    group = fake_group(1, build_engine=lambda *_: (10, 0, 99), score=lambda *_: [torch.zeros(1)])
    entries = [{"type": "model", "name": "sees", "classifier": {"path": str(model_folder)}}]
    scorer = build_reward_engines(RewardConfig(functions=entries), group)["sees"]
    ((_, answer),) = scorer.score([job("1+1=", "7")])
    assert answer.failure.startswith("the text spells '7', by which the reward model knows an image")


def test_an_engine_is_built_for_every_entry_of_type_model(fake_group, model_folder):
    group = fake_group(1, build_engine=lambda *_: (10, 0, 99))
    entries = [
        "rules.py:score",
        {"type": "model", "name": "helpful", "classifier": {"path": str(model_folder)}},
        {"type": "model", "name": "harmless", "classifier": {"path": str(model_folder)}, "weight": 0.5},
    ]
    scorers = build_reward_engines(RewardConfig(functions=entries), group)
    assert list(scorers) == ["helpful", "harmless"]
    built = [call for call in group.calls if call[0] == "build_engine"]
    assert [(role, EngineSource.model_validate_json(source).head) for _, role, source in built] == [
        ("reward helpful", "sequence_scores"),
        ("reward harmless", "sequence_scores"),
    ]


TEXT = {"type": "text", "text": "?"}
PROMPTS = [
    {"prompt": "<image>or<image>?", "images": ["0.png", "1.png"]},
    {"prompt": "2+3="},
    {"prompt": [{"role": "user", "content": [{"type": "image"}, TEXT]}], "images": ["1.png"]},
]


@pytest.fixture
def pictures(tmp_path):
    """Writes the rows of prompts, with their images beside them."""
    for number, size in enumerate(((16, 8), (20, 44))):
        noise(size, seed=number).save(tmp_path / f"{number}.png")
    rows = [row | {"answer": "5"} for row in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "prompts.jsonl")


def jobs_of(files, folder, answers=("12", "5", "a"), **settings):
    """The jobs that judge answers to the prompts of a policy, and how it is shown images."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vision = Vision.load(folder, tokenizer)
    data = PromptDataConfig(ground_truth_column="answer", **settings)
    examples = prompt_examples(data, [files], tokenizer, max_rows=None, vision=vision).rows
    return [
        job(example.uid, answer, messages=example.messages, images=[file_of(one) for one in example.image_refs])
        for example, answer in zip(examples, answers, strict=True)
    ], vision


def reward_folder(family, path: Path, *, seed: int) -> Path:
    """A reward model that sees images, as `shardwise reward-model` exports it."""
    vision_folder(family, path / "base", seed=seed)
    engine = TrainEngine.build(
        path / "base",
        EngineConfig(),
        device=torch.device("cpu"),
        optimizer=OptimizerConfig(),
        head="sequence_scores",
    )
    engine.export_hf(path / "hf", AutoTokenizer.from_pretrained(path / "base"))
    return path / "hf"


def scores_of_transformers(folder, tmp_path, files, answers):
    """What the exported class says of the conversations, each alone, as `shardwise sft` reads them."""
    lines = Path(files).read_text().splitlines()
    rows = [json.loads(line) | {"response": answer} for line, answer in zip(lines, answers, strict=True)]
    (tmp_path / "answered.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vision, reader = Vision.load(folder, tokenizer), ImageReader.load(folder)
    config, files = SupervisedDataConfig(), [str(tmp_path / "answered.jsonl")]
    samples = supervised_samples(config, files, tokenizer, max_rows=None, vision=vision).rows
    model = AUTO_CLASSES["sequence_scores"].from_pretrained(folder, trust_remote_code=True, attn_implementation="eager")
    found = []
    for sample in samples:
        seen = replace(sample, images=reader.read(sample.image_refs)) if sample.image_refs else sample
        with torch.no_grad():
            found.append(float(reference_logits(model.eval(), seen)))
    return found


def entries_of(folder):
    return RewardConfig(functions=[{"type": "model", "name": "sees", "classifier": {"path": str(folder)}}])


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("qwen3_vl", "qwen3_vl"),
        ("mistral3", "mistral3"),
        pytest.param("gemma3", "gemma3", marks=pytest.mark.full),
        ("qwen3_vl", "llava"),
        ("mistral3", "qwen3_vl"),
    ],
)
def test_a_reward_model_that_sees_images_scores_them_as_its_class_of_transformers_does(
    group_of_one, pictures, tmp_path, family, policy
):
    """Whatever sees them otherwise and answers: tokens, pixels and places are the reward model's own."""
    vision_folder(policy, tmp_path / "policy", seed=7)
    folder = reward_folder(family, tmp_path, seed=1)
    answers = ("12", "5", "a")
    jobs, shown_by = jobs_of(pictures, tmp_path / "policy", answers)
    scorer = build_reward_engines(entries_of(folder), group_of_one, shown_by)["sees"]
    found = dict(scorer.score(jobs))
    expected = scores_of_transformers(folder, tmp_path, pictures, answers)
    assert [found[place].failure for place in range(3)] == [None] * 3
    assert [found[place].score for place in range(3)] == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, expected)) > 0.01
    exchanged = dict(scorer.score([jobs[0], replace(jobs[2], images=[str(tmp_path / "0.png")])]))
    assert abs(exchanged[1].score - found[2].score) > 1e-4
    assert exchanged[0].score == pytest.approx(found[0].score, abs=1e-5)


def name_tile_marks(folder):
    """Has the tokenizer of an InternVL name them, as those of the hub do."""
    path = folder / "tokenizer_config.json"
    names = {"start_image_token": "<img>", "end_image_token": "</img>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": names}))


@pytest.mark.parametrize(("family", "policy"), [("internvl", "qwen3_vl"), ("qwen3_vl", "internvl")])
def test_a_line_that_ends_behind_an_image_is_read_as_it_was_learnt(scorer, pictures, tmp_path, family, policy):
    """The template of InternVL ends it itself, and that of Qwen does not."""
    for name, folder in ((policy, "policy"), (family, "judge")):
        vision_folder(name, tmp_path / folder)
        if name == "internvl":
            name_tile_marks(tmp_path / folder)
    prompts, answered = tmp_path / "lines.jsonl", tmp_path / "answered.jsonl"
    row = {"prompt": "<image>\nWhich?", "images": ["0.png"], "answer": "5"}
    prompts.write_text(json.dumps(row))
    answered.write_text(json.dumps(row | {"response": "12"}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "judge")
    vision = Vision.load(tmp_path / "judge", tokenizer)
    (asked,), shown_by = jobs_of(str(prompts), tmp_path / "policy", ("12",))
    sent = ModelScorer(with_room(scorer.engine, 400), tokenizer, None, vision=vision, shown_by=shown_by)._sample(asked)
    data = SupervisedDataConfig(), [str(answered)], tokenizer
    (learnt,) = supervised_samples(*data, max_rows=None, vision=vision).rows
    assert sent.token_ids.tolist() == learnt.token_ids.tolist()
    words = ModelScorer(with_room(scorer.engine, 400), scorer._tokenizer, None, shown_by=shown_by)._sample(asked)
    image = {"internvl": "<IMG_CONTEXT>\n", "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>\n"}[policy]
    assert f"{image}Which?" in scorer._tokenizer.decode(words.token_ids)


def test_a_run_is_rewarded_by_a_model_that_sees_the_images_of_its_prompts(
    group_of_one, pictures, tmp_path, monkeypatch
):
    vision_folder("qwen3_vl", tmp_path / "policy")
    folder = reward_folder("qwen3_vl", tmp_path, seed=1)
    tree = {
        "model": {"path": str(tmp_path / "policy")},
        "data": {"train_files": pictures, "max_prompt_tokens": 64, "ground_truth_column": "answer"},
        "reward": entries_of(folder).model_dump(mode="json"),
        "engine": {"max_tokens_per_micro_batch": 128},
        "rollout": {"num_prompts": 3, "group_size": 2, "max_response_tokens": 5, "probe_every_syncs": 0},
        "trainer": {"total_steps": 1, "output_dir": str(tmp_path / "run")},
    }
    scored, score = [], ModelScorer.score

    def spy(self, jobs):
        scored.extend(jobs)
        return score(self, jobs)

    monkeypatch.setattr(ModelScorer, "score", spy)
    train(RLConfig.parse(tree, origin="test"), group_of_one)
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [line["reward_failure"] for line in lines] == [None] * 6
    assert sorted(len(job.images) for job in scored) == [0, 0, 1, 1, 2, 2]
    for line in lines:
        place = int(line["uid"].removeprefix("prompts.jsonl line ")) - 1
        expected = scores_of_transformers(folder, tmp_path, pictures, [line["completion"]] * 3)[place]
        assert line["reward"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_reward_model_that_places_no_image_stops_a_run_that_has_images_before_anything_is_sampled(
    group_of_one, pictures, tmp_path, is_silent
):
    """A run on words goes on. The tokenizer of this InternVL does not name its marks, or its template writes none."""
    vision_folder("qwen3_vl", tmp_path / "policy")
    folder = reward_folder("internvl", tmp_path, seed=1)
    reason = "the tokenizer does not say what its start_image_token is"
    if is_silent:
        name_tile_marks(folder)
        template, reason = folder / "chat_template.jinja", "the chat template of .* writes '' for an image"
        template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    words = tmp_path / "words.jsonl"
    words.write_text(json.dumps({"prompt": "2+3=", "answer": "5"}))

    def run(files):
        tree = {
            "model": {"path": str(tmp_path / "policy")},
            "data": {"train_files": files, "max_prompt_tokens": 64, "ground_truth_column": "answer"},
            "reward": entries_of(folder).model_dump(mode="json"),
            "rollout": {"num_prompts": 1, "group_size": 2, "max_response_tokens": 5, "probe_every_syncs": 0},
            "trainer": {"total_steps": 1, "output_dir": str(tmp_path / Path(files).stem)},
        }
        train(RLConfig.parse(tree, origin="test"), group_of_one)

    with pytest.raises(
        ModelError, match=rf"^reward\.functions \(sees\): there are images, of which it places none: .*{reason}"
    ):
        run(pictures)
    assert not (tmp_path / "prompts").exists()
    group_of_one.call("close")
    run(str(words))
    (line, _) = (tmp_path / "words" / "samples.jsonl").read_text().splitlines()
    assert json.loads(line)["reward_failure"] is None


def test_a_reward_model_of_words_reads_what_the_policys_template_writes_for_an_image(
    fake_group, pictures, tmp_path, model_folder, scorer
):
    """As text: to its own tokenizer the marks are nothing special."""
    vision_folder("qwen3_vl", tmp_path / "policy")
    jobs, shown_by = jobs_of(pictures, tmp_path / "policy")
    engine = with_room(scorer.engine, 400)
    words = ModelScorer(engine, scorer._tokenizer, None, shown_by=shown_by)
    sent = [words._sample(job) for job in jobs]
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    for sample, prompt, answer in zip(sent, (f"{mark}or{mark}?", "2+3=", f"{mark}?"), ("12", "5", "a"), strict=True):
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        expected = scorer._tokenizer.apply_chat_template(messages, return_dict=False)
        assert sample.token_ids.tolist() == expected
        assert (sample.image_refs, sample.position_ids) == ([], None)


def test_what_a_reward_model_cannot_be_shown_fails_and_the_others_are_scored(scorer, pictures, tmp_path):
    """Mistral 3 takes no image of one token; no text may spell the token by which it knows one."""
    vision_folder("qwen3_vl", tmp_path / "policy")
    vision_folder("mistral3", tmp_path / "judge")
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "judge")
    vision = Vision.load(tmp_path / "judge", tokenizer)
    jobs, _ = jobs_of(pictures, tmp_path / "policy", ("12", "5", "a"))
    engine = with_room(scorer.engine, 400)
    sees = ModelScorer(engine, tokenizer, None, [vision.image_token_id], vision=vision)
    spells = replace(jobs[2], uid=jobs[0].uid, solution_str="[IMG]", images=[str(tmp_path / "0.png")])
    answers = dict(sees.score([*jobs, spells, replace(jobs[1], solution_str="[IMG]")]))
    assert answers[0].failure.startswith("prompts.jsonl line 1: image 2 (")
    assert "takes no image of less than 2" in answers[0].failure
    assert answers[1].score > 0
    assert answers[2].failure.startswith("prompts.jsonl line 3: image 1 (")
    assert answers[3].failure.startswith("prompts.jsonl line 1: the text has 2 times '[IMG]' for 1 images")
    assert (
        answers[4].failure
        == "the text spells '[IMG]', by which the reward model knows an image or a video, and is shown none"
    )


def test_a_system_prompt_that_spells_the_placeholder_has_no_image(scorer, pictures, tmp_path):
    vision_folder("qwen3_vl", tmp_path / "policy")
    jobs, vision = jobs_of(pictures, tmp_path / "policy", system_prompt="Look at the <image>.")
    engine = with_room(scorer.engine, 400)
    sees = ModelScorer(engine, AutoTokenizer.from_pretrained(tmp_path / "policy"), None, vision=vision)
    sample = sees._sample(jobs[0])
    assert [len(sample.image_refs), sample.position_ids.shape[1]] == [2, len(sample.token_ids)]
    assert "the <image>." in sees._tokenizer.decode(sample.token_ids)


def test_a_reward_model_whose_image_processor_cannot_be_used_fails_where_there_are_images(scorer, pictures, tmp_path):
    """It has learnt from images: what the policy's template writes for one would be scored as other words."""
    vision_folder("qwen3_vl", tmp_path / "policy")
    vision_folder("mistral3", tmp_path / "judge")
    jobs, shown_by = jobs_of(pictures, tmp_path / "policy")
    (tmp_path / "judge" / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "judge")
    vision = Vision.load(tmp_path / "judge", tokenizer)
    engine = with_room(scorer.engine, 400)
    answers = dict(ModelScorer(engine, tokenizer, None, vision=vision, shown_by=shown_by).score(jobs))
    for place in (0, 2):
        assert answers[place].failure.startswith(f"prompts.jsonl line {place + 1}: the row has ")
        assert "the image processor is CLIPImageProcessorPil" in answers[place].failure
    assert answers[1].score > 0
