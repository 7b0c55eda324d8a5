"""The embedded engine on prompts with images, against transformers' own generate and forward."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_models import tiny_vision_model
from transformers import GenerationConfig
from vision_samples import (
    assert_scores_of,
    reference_logprobs,
    request_of,
    transformers_inputs,
    vision_families,
    vision_sample,
)

from shardwise.config import ModelError
from shardwise.families import vision_paths
from shardwise.model_config import media_token_ids
from shardwise.rollout import EmbeddedEngine
from shardwise.types import Sample

QUICK = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "mistral3", "llava_next", "gemma3")
GRIDS = [[(1, 4, 6), (1, 2, 2)], [], [(1, 6, 8)], [], [(1, 2, 4)], [(1, 8, 4), (1, 2, 2), (1, 4, 4)]]
MAX_TOKENS = 9
asking = partial(request_of, max_tokens=MAX_TOKENS, temperature=0.0)


@pytest.fixture(scope="module", params=vision_families(*QUICK))
def model(request):
    model = tiny_vision_model(request.param)
    model.generation_config = GenerationConfig(eos_token_id=3, pad_token_id=0)
    return model.eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def samples(model):
    return [vision_sample(model, f"row {index}", grids, seed=index) for index, grids in enumerate(GRIDS)]


def open_engine(folder, max_rows=16, **options):
    device = torch.device("cpu")
    return EmbeddedEngine.from_folder(folder, dtype=torch.float32, max_rows=max_rows, device=device, **options)


@torch.no_grad()
def generated(model, sample: Sample) -> list[int]:
    """By transformers' greedy generate, of one prompt."""
    seen = transformers_inputs(model, sample)
    banned = media_token_ids(model.config)
    tokens = model.generate(
        sample.token_ids[None], max_new_tokens=MAX_TOKENS, do_sample=False, suppress_tokens=banned, **seen
    )
    return tokens[0, len(sample.token_ids) :].tolist()


def whole(sample: Sample, token_ids: list[int]) -> Sample:
    tokens = torch.cat([sample.token_ids, torch.tensor(token_ids)])
    return replace(sample, token_ids=tokens, loss_mask=torch.arange(len(tokens)) >= len(sample.token_ids))


@torch.no_grad()
def assert_own_logprobs(model, sample: Sample, completion) -> None:
    """Within 1e-5 of the policy's in float64, or twice as far as transformers' own in float32: the recurrences of
    qwen3_5 turn rounding into more on some prompts."""
    seen = whole(sample, completion.token_ids)
    exact, policy = seen, deepcopy(model).double()
    policy.set_experts_implementation("eager")  # grouped products have no float64
    if seen.images is not None:
        exact = replace(seen, images=replace(seen.images, pixel_values=seen.images.pixel_values.double()))
    rounded = reference_logprobs(model, seen)[len(sample.token_ids) :]
    expected = reference_logprobs(policy, exact)[len(sample.token_ids) :]
    bound = max(1e-5, 2 * float((rounded - expected).abs().max()))
    assert bound < 2e-4
    torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected.double(), atol=bound, rtol=1e-5)


@pytest.mark.parametrize("model", vision_families(*QUICK, "glm4v"), indirect=True)
@pytest.mark.parametrize("max_rows", [3, *(pytest.param(rows, marks=pytest.mark.full) for rows in (1, 16))])
def test_greedy_completions_equal_those_of_generate_token_for_token(model, folder, samples, max_rows):
    """With 1 and 3 rows prompts with images and without wait for each other, and finished rows move."""
    found = open_engine(folder, max_rows).generate([asking(sample) for sample in samples])
    expected = [generated(model, sample) for sample in samples]
    assert [group[0].token_ids for group in found] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(samples)
    for sample, (completion,) in zip(samples, found, strict=True):
        assert_own_logprobs(model, sample, completion)


def test_what_is_said_depends_on_the_images(model, folder, samples):
    sample = samples[2]
    other = replace(sample.images, pixel_values=-sample.images.pixel_values)
    asked = [asking(sample), asking(replace(sample, images=other))]
    (first,), (second,) = open_engine(folder).generate(asked)
    assert first.logprobs != second.logprobs


@pytest.mark.parametrize("max_rows", [3, 32])
def test_the_completions_of_a_group_are_sampled_by_the_policy(model, folder, samples, max_rows, monkeypatch):
    """A group that fits is shown to the tower once; image tokens are never drawn, nor those of videos."""
    engine = open_engine(folder, max_rows)
    assert engine._cached.banned.tolist() == media_token_ids(model.config)
    num_seen = []
    look = engine._cached.sight.look
    monkeypatch.setattr(engine._cached.sight, "look", lambda images: num_seen.append(len(images)) or look(images))
    asked = [asking(sample, temperature=1.0, num_completions=4, max_tokens=6) for sample in samples]
    groups = engine.generate(asked)
    for sample, group in zip(samples, groups, strict=True):
        assert len({tuple(one.token_ids) for one in group}) > 1
        for completion in group:
            assert not {*media_token_ids(model.config)} & set(completion.token_ids)
            assert_own_logprobs(model, sample, completion)
    if max_rows == 32:
        assert sum(num_seen) == 4  # prompts that have images


@pytest.mark.parametrize("model", ["mistral3"], indirect=True)
def test_pixtral_looks_at_the_images_of_one_prompt_at_a_time(folder, samples):
    """Its mask is over all patches of what it looks at."""
    engine = open_engine(folder)
    num_seen = []
    engine._cached.sight._backbone.vision_tower.register_forward_pre_hook(
        lambda module, args, kwargs: num_seen.append(len(kwargs["image_sizes"])), with_kwargs=True
    )
    engine.generate([asking(sample) for sample in samples])
    assert sorted(num_seen) == [1, 1, 2, 3]


def test_logprobs_of_known_prompts_are_those_that_the_policy_gives_behind_their_images(model, folder, samples):
    found = open_engine(folder).logprobs([s.token_ids.tolist() for s in samples], [s.images for s in samples])
    assert_scores_of(model, samples, found, atol=5e-5)


def test_a_completion_goes_on_where_it_was_interrupted(folder, samples):
    engine = open_engine(folder)
    asked = [asking(sample, temperature=1.0) for sample in samples]
    expected = engine.generate(asked)
    going_on = [
        replace(request, partial_token_ids=group[0].token_ids[:2], max_tokens=MAX_TOKENS - 2)
        for request, group in zip(asked, expected, strict=True)
        if len(group[0].token_ids) > 2
    ]
    assert len(going_on) > 3
    told = {request.uid: group[0] for request, group in zip(asked, expected, strict=True)}
    for request, (rest,) in zip(going_on, engine.generate(going_on), strict=True):
        assert rest.token_ids == told[request.uid].token_ids[2:]
        torch.testing.assert_close(rest.logprobs, told[request.uid].logprobs[2:], atol=1e-5, rtol=1e-5)


def test_synced_weights_include_the_tower(model, folder, samples):
    engine = open_engine(folder)
    before = engine.generate([asking(samples[0])])
    tower = vision_paths(model)[0]
    changed = {name: 1.5 * tensor for name, tensor in engine.served_weights() if name.startswith(f"{tower}.")}
    assert changed
    engine.load_weights(changed.items())
    engine.commit_weights(1)
    after = engine.generate([asking(samples[0])])
    assert before[0][0].logprobs != after[0][0].logprobs


def test_prompts_and_images_that_do_not_fit_are_refused_by_name(folder, samples):
    engine = open_engine(folder)
    for sample in (replace(samples[0], images=samples[4].images), replace(samples[0], images=None)):
        with pytest.raises(ModelError, match=r"row 0: the prompt has \d+ image tokens .* images take"):
            engine.generate([asking(sample)])
