"""Preferences on images are those of transformers' model, pair by pair, on every layout."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from bad_steps import build, parameters_of
from torch.nn.functional import softplus
from vision_folders import noise, vision_folder
from vision_samples import reference_logits, reference_logprobs, vision_families

from shardwise.config import BradleyTerry, EngineConfig, ModelConfig, PreferenceDataConfig
from shardwise.config.preference import Dpo
from shardwise.data import ImageReader, Vision, load_tokenizer, pack, preference_pairs, unpack
from shardwise.engine.model_classes import AUTO_CLASSES
from shardwise.recipes.losses import LossSource

IMAGE, BETA = {"type": "image"}, 0.1


def text(words):
    return {"type": "text", "text": words}


def turn(role, content):
    return {"role": role, "content": content}


ROWS = [
    {"prompt": "<image>or<image>?", "chosen": "12", "rejected": "no", "images": ["0.png", "1.png"]},
    {"prompt": "2+3=", "chosen": "5", "rejected": "77"},
    {
        "prompt": [turn("user", [IMAGE, text("Which?")])],
        "chosen": [turn("assistant", [text("It is 3")])],
        "rejected": [turn("assistant", [text("4")])],
        "images": ["2.png"],
    },
    {
        "chosen": [turn("user", [text("a"), IMAGE | {"image": "1.png"}]), turn("assistant", "b")],
        "rejected": [turn("user", [text("a"), IMAGE | {"image": "1.png"}]), turn("assistant", "cdef")],
    },
]
"""Two images, none, one in a list of parts, one in whole conversations."""


@pytest.fixture(
    scope="module",
    params=vision_families("qwen3_vl", of=("qwen3_vl", "qwen2_5_vl", "mistral3", "llava", "gemma3")),
)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folders(family, tmp_path_factory):
    """Of a policy and of another model, its reference."""
    paths = [tmp_path_factory.mktemp(family) / name for name in ("policy", "reference")]
    return paths, [vision_folder(family, path, seed=seed) for seed, path in enumerate(paths)]


@pytest.fixture(scope="module")
def pairs(folders, tmp_path_factory):
    (folder, _), _ = folders
    place = tmp_path_factory.mktemp("rows")
    for number, size in enumerate(((16, 8), (20, 44), (24, 24))):
        noise(size, seed=number).save(place / f"{number}.png")
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    read = partial(preference_pairs, max_rows=None, vision=Vision.load(folder, tokenizer))
    return read(PreferenceDataConfig(), [str(place / "rows.jsonl")], tokenizer).rows


def step(folder, reference, pairs, layout):
    """The loss of a step, its gradients by name, and the sums of what the reference says of the answers. Without a
    reference the policy is a reward model, and scores them itself."""
    num_sharing = layout.get("ulysses_size", 1)
    num_shards, place = dist.get_world_size() // num_sharing, dist.get_rank() // num_sharing
    engine, head = EngineConfig(**layout), "sequence_scores" if reference is None else "logprobs"
    worker = build(folder, engine=engine, head=head)
    if reference is None:
        worker.use_loss("policy", LossSource.of("reward_model", BradleyTerry()).model_dump_json())
    else:
        build(reference, role="reference", engine=engine.frozen(), worker=worker)
        worker.use_loss("policy", LossSource.of("preference", Dpo(beta=BETA), kl=0.0).model_dump_json())
    packed = pack(pairs, num_shards=num_shards, max_tokens=64)
    shards = [None] * dist.get_world_size()
    role = "policy" if reference is None else "reference"
    dist.all_gather_object(shards, worker.score(packed.shards[place], role, True))
    scores = unpack(packed, shards[::num_sharing])
    if reference is not None:
        pairs = [replace(sample, ref_logprobs=values) for sample, values in zip(pairs, scores, strict=True)]
    packed = pack(pairs, num_shards=num_shards, max_tokens=128, keep_together=2)
    hosted = worker.engines["policy"]
    metrics = hosted.engine.forward_backward(
        hosted.read(packed.shards[place]), hosted.loss.function, packed.denominators, **hosted.options
    )
    loss = torch.tensor(metrics["train/loss"].result(), dtype=torch.float64)
    dist.all_reduce(loss)
    named = parameters_of(worker)
    gradients = {name: one.grad.full_tensor().clone() for name, one in named.items() if one.grad is not None}
    return float(loss) / num_sharing, gradients, torch.stack([values.sum() for values in scores])


def shown(folder, pairs):
    """The samples with their images read, for transformers."""
    reader = ImageReader.load(folder)
    return [replace(one, images=reader.read(one.image_refs)) if one.image_refs else one for one in pairs]


def assert_same(ranks, model, gaps, scores):
    """Loss to 2e-6, scores to 1e-5 and 1e-6 of their size, every gradient to 1e-5 of the largest one."""
    loss = torch.stack([softplus(-gap) for gap in gaps]).mean()
    model.zero_grad()
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert any("vis" in name and float(gradient.abs().max()) > 1e-2 * largest for name, gradient in expected.items())
    for found, gradients, said in ranks:
        assert found == pytest.approx(float(loss.detach()), abs=2e-6)
        torch.testing.assert_close(said, scores, atol=1e-5, rtol=1e-6)
        reached = {name: gradient for name, gradient in gradients.items() if name in expected}
        torch.testing.assert_close(reached, expected, atol=1e-5 * largest, rtol=1e-4)
        assert not any(gradient.any() for name, gradient in gradients.items() if name not in expected)


LAYOUTS = [
    pytest.param(1, {}, id="one rank"),
    pytest.param(2, {}, id="two ranks"),
    pytest.param(2, {"ulysses_size": 2}, id="shared packs"),
]


@pytest.mark.parametrize(("num_ranks", "layout"), LAYOUTS)
def test_dpo_of_pairs_with_images_is_that_of_transformers(run_ranks, folders, pairs, num_ranks, layout):
    """The reference is another model, and sees the same images."""
    (folder, reference_folder), (model, reference) = folders
    samples = shown(folder, pairs)
    with torch.no_grad():
        ref_sums = torch.stack([reference_logprobs(reference, sample).sum() for sample in samples])
    ratios = [reference_logprobs(model, sample).sum() - own for sample, own in zip(samples, ref_sums, strict=True)]
    gaps = [BETA * (chosen - rejected) for chosen, rejected in zip(ratios[::2], ratios[1::2], strict=True)]
    assert_same(run_ranks(step, num_ranks, folder, reference_folder, pairs, layout), model, gaps, ref_sums)


@pytest.fixture(scope="module")
def reward_folder(folders, run_ranks, tmp_path_factory):
    (folder, _), _ = folders
    out = tmp_path_factory.mktemp("reward_model") / "hf"
    run_ranks(export_reward_model, 1, folder, out)
    return out


def export_reward_model(folder, out):
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    build(folder, head="sequence_scores").engines["policy"].engine.export_hf(out, tokenizer)


@pytest.mark.parametrize(("num_ranks", "layout"), LAYOUTS)
def test_a_reward_model_of_pairs_with_images_is_its_class_in_transformers(
    run_ranks, reward_folder, pairs, num_ranks, layout
):
    samples = shown(reward_folder, pairs)
    kind = AUTO_CLASSES["sequence_scores"]
    model = kind.from_pretrained(reward_folder, trust_remote_code=True, attn_implementation="eager").eval()
    scores = torch.stack([reference_logits(model, sample)[0] for sample in samples])
    assert float(scores.detach().std()) > 0.01
    gaps = list(scores[::2] - scores[1::2])
    assert_same(run_ranks(step, num_ranks, reward_folder, None, pairs, layout), model, gaps, scores.detach())
