"""Reward models as engines: what they are given, and what becomes of their scores."""

import pytest
import torch

from shardwise.config import FrozenEngineConfig, ModelConfig, RewardConfig
from shardwise.data import load_tokenizer
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.engines import RemoteEngine
from shardwise.recipes.opened_model import OpenedModel
from shardwise.recipes.reward_engines import ModelScorer, build_reward_engines
from shardwise.rewards import RewardJob


def job(prompt, completion, *, messages=None) -> RewardJob:
    return RewardJob(
        uid=prompt, data_source="", prompt=prompt, messages=messages, solution_str=completion, ground_truth=None
    )


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
