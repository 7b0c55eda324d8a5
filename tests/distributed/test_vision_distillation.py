"""A student that sees images learns from a teacher that sees the same: transformers' numbers, on every layout."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from bad_steps import build
from test_vision_preferences import LAYOUTS, shown
from vision_folders import noise, vision_folder
from vision_samples import reference_logits, vision_families

from shardwise.config import DistillationConfig, EngineConfig, ModelConfig, SupervisedDataConfig
from shardwise.data import pack, supervised_samples, unpack
from shardwise.recipes.losses import LossSource
from shardwise.recipes.opened_model import open_companion, open_model, shared_vision

COEF, TEMPERATURE = 0.3, 1.7


def talk(content, answer):
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


ROWS = [
    {"messages": talk("<image>or<image>?", "12"), "images": ["0.png", "1.png"]},
    {"messages": talk("2+3=", "5")},
    {"messages": talk([{"type": "image"}, {"type": "text", "text": "Which?"}], "It is 3"), "images": ["2.png"]},
]


@pytest.fixture(
    scope="module",
    params=vision_families("qwen3_vl", of=("qwen3_vl", "qwen2_5_vl", "glm4v", "mistral3", "llava", "gemma3")),
)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folders(family, tmp_path_factory):
    """Of a student and of its teacher."""
    paths = [tmp_path_factory.mktemp(family) / name for name in ("student", "teacher")]
    return paths, [vision_folder(family, path, seed=seed) for seed, path in enumerate(paths)]


@pytest.fixture(scope="module")
def samples(folders, tmp_path_factory):
    """As the recipe reads them."""
    student, teacher = (ModelConfig(path=str(folder)) for folder in folders[0])
    place = tmp_path_factory.mktemp("rows")
    for number, size in enumerate(((16, 8), (20, 44), (24, 24))):
        noise(size, seed=number).save(place / f"{number}.png")
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    model = open_model(student)
    vision = shared_vision(model.vision, {"teacher.model": open_companion(teacher, model, said="", num_tokens=1)})
    assert vision is model.vision
    files = [str(place / "rows.jsonl")]
    return supervised_samples(SupervisedDataConfig(), files, model.tokenizer, max_rows=None, vision=vision).rows


def step(folder, teacher, samples, layout):
    """Loss, gradients by name, the divergences of held-out samples, and the loss and norm that a step reports."""
    num_sharing = layout.get("ulysses_size", 1)
    num_shards, place = dist.get_world_size() // num_sharing, dist.get_rank() // num_sharing
    engine = EngineConfig(**layout)
    worker = build(folder, engine=engine)
    build(teacher, role="teacher", engine=engine.frozen(), worker=worker)
    worker.check_teacher("policy", "teacher")
    config = DistillationConfig(temperature=TEMPERATURE, cross_entropy_coef=COEF)
    worker.use_loss("policy", LossSource.of("distillation", config).model_dump_json())
    packed = pack(samples, num_shards=num_shards, max_tokens=64)
    batches, shards = packed.shards[place], [None] * dist.get_world_size()
    dist.all_gather_object(shards, worker.divergence(batches, "policy", "teacher"))
    metrics = worker.train(batches, packed.denominators, "policy", "teacher")
    loss = torch.tensor(metrics["train/loss"].result(), dtype=torch.float64)
    dist.all_reduce(loss)
    return float(loss) / num_sharing, metrics["train/grad_norm"].result(), unpack(packed, shards[::num_sharing])


def darkened(sample):
    """With black images."""
    if sample.images is None:
        return sample
    black = torch.zeros_like(sample.images.pixel_values)
    return replace(sample, images=replace(sample.images, pixel_values=black))


def expected_of(student, teacher, samples, seen_by_teacher):
    """The same from all logits of both models, each sample alone."""
    total, count, rows = 0.0, 0, []
    for sample, taught in zip(samples, seen_by_teacher, strict=True):
        logits = reference_logits(student, sample)
        with torch.no_grad():
            p = (reference_logits(teacher, taught) / TEMPERATURE).log_softmax(-1)
        q = (logits / TEMPERATURE).log_softmax(-1)
        divergence = (p.exp() * (p - q)).sum(-1)[:-1]
        surprise = -logits[:-1].log_softmax(-1).gather(1, sample.token_ids[1:, None])[:, 0]
        trained = sample.loss_mask[1:]
        total = total + ((divergence + COEF * surprise) * trained).sum()
        count += int(trained.sum())
        rows.append(torch.cat([divergence.new_zeros(1), (divergence * trained).detach()]))
    student.zero_grad()
    (total / count).backward()
    gradients = [p.grad for p in student.parameters() if p.grad is not None]
    return float(total.detach()) / count, float(torch.nn.utils.get_total_norm(gradients)), rows


@pytest.mark.parametrize(("num_ranks", "layout"), LAYOUTS)
def test_a_student_and_its_teacher_see_what_they_see_in_transformers(run_ranks, folders, samples, num_ranks, layout):
    (folder, teacher_folder), (student, teacher) = folders
    seen = shown(folder, samples)
    _, _, blind = expected_of(student, teacher, seen, list(map(darkened, seen)))
    loss, norm, rows = expected_of(student, teacher, seen, seen)
    assert loss > 0.01
    assert max(float((one - other).abs().max()) for one, other in zip(blind, rows, strict=True)) > 1e-4
    for found, found_norm, divergences in run_ranks(step, num_ranks, folder, teacher_folder, samples, layout):
        assert found == pytest.approx(loss, rel=2e-6)
        assert found_norm == pytest.approx(norm, rel=1e-5)
        torch.testing.assert_close(divergences, rows, atol=2e-6, rtol=1e-5)
