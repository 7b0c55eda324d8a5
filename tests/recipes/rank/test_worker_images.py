"""Workers read the images of their own micro-batches, and a bundle keeps what they saw."""

import io
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from bad_steps import build, parameters_of
from ranks import RankError
from tiny_models import tiny_vision_model
from transformers import Qwen2VLImageProcessorPil
from vision_folders import noise
from vision_samples import vision_samples

from shardwise.config import DistillationConfig, EngineConfig, ModelConfig, SamplingConfig
from shardwise.data import pack
from shardwise.data.images import ImageReader
from shardwise.data.synthetic import train_tokenizer
from shardwise.recipes.bundles import Bundle, MicroBatchRecord, _batch, _named_tensors
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.losses import LossSource
from shardwise.recipes.rank.worker import Worker
from shardwise.recipes.replay import replay
from shardwise.recipes.sampling.samples import to_samples
from shardwise.types import Example, GenerateRequest, RolloutGroup, Sample, TokenBatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_vision_model("qwen3_vl").save_pretrained(path)
    Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}).save_pretrained(path)
    train_tokenizer(["2+3=5"], vocab_size=261).save_pretrained(path)
    return path


def as_image_refs(sample: Sample, folder) -> Sample:
    """The sample with files of random images, as large as those that it has."""
    if sample.images is None:
        return sample
    reader = ImageReader.load(folder)
    image_refs = []
    for number, (_, height, width) in enumerate(sample.images.sizes.tolist()):
        file = io.BytesIO()
        noise((4 * width, 4 * height), seed=number).save(file, "PNG")
        image_refs.append(reader.open(file.getvalue(), folder, f"row {sample.uid}: image {number + 1}"))
    return replace(sample, images=None, image_refs=image_refs)


def source(folder: str, layout) -> str:
    return EngineSource(model=ModelConfig(path=folder), layout=layout).model_dump_json()


def scored(folder: str, shards) -> list[torch.Tensor]:
    worker = Worker(torch.device("cpu"))
    worker.build_engine("policy", source(folder, EngineConfig().frozen()))
    return worker.score(shards[dist.get_rank()], "policy", True)


def test_a_rank_reads_the_images_of_its_own_rows(run_ranks, folder):
    samples = [as_image_refs(sample, folder) for sample in vision_samples(tiny_vision_model("qwen3_vl"))]
    shards = pack(samples, num_shards=2, max_tokens=40).shards
    assert all(batch.images is None for shard in shards for batch in shard)
    reader = ImageReader.load(folder)
    read = [
        [replace(b, images=reader.read(b.image_refs), image_refs=[]) if b.image_refs else b for b in shard]
        for shard in shards
    ]
    found, expected = run_ranks(scored, 2, str(folder), shards), run_ranks(scored, 2, str(folder), read)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


class WatchedReader(ImageReader):
    """Keeps the names of what it decodes."""

    def read(self, image_refs):
        self.names = [*getattr(self, "names", []), *(image_ref.name for image_ref in image_refs)]
        return super().read(image_refs)


def shared(folder: str, shards) -> tuple[list[torch.Tensor], list[str]]:
    """The scores of two ranks that share each pack, and what this one of them has decoded."""
    worker = Worker(torch.device("cpu"))
    worker.build_engine("policy", source(folder, EngineConfig(ulysses_size=2).frozen()))
    hosted = worker.engines["policy"]
    hosted.reader = WatchedReader(hosted.reader._processor)
    return worker.score(shards[0], "policy", True), hosted.reader.names


def test_ranks_that_share_a_pack_read_each_image_once(run_ranks, folder):
    samples = [as_image_refs(sample, folder) for sample in vision_samples(tiny_vision_model("qwen3_vl"))]
    shards = pack(samples, num_shards=1, max_tokens=256).shards
    (expected,) = run_ranks(scored, 1, str(folder), shards)
    ranks = run_ranks(shared, 2, str(folder), shards)
    for found, _ in ranks:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert all(names for _, names in ranks)
    assert [name for _, names in ranks for name in names] == [p.name for p in shards[0][0].image_refs]


def events(folder: str, shards) -> list[str]:
    """What a worker that scores does, in its order: read images, look at some."""
    worker, found = Worker(torch.device("cpu")), []
    worker.build_engine("policy", source(folder, EngineConfig().frozen()))
    hosted = worker.engines["policy"]
    read = hosted.reader.read
    hosted.reader.read = lambda image_refs: found.append("read") or read(image_refs)
    hosted.engine._model.hf_model.get_submodule("model.visual").register_forward_pre_hook(
        lambda *_: found.append("look")
    )
    worker.score(shards[dist.get_rank()], "policy", True)
    return found


def test_scoring_reads_the_images_of_a_micro_batch_when_it_comes(run_ranks, folder):
    """Of thousands of held-out rows the pixels of one micro-batch are held. Without an image the tower sees a black
    one."""
    samples = [as_image_refs(sample, folder) for sample in vision_samples(tiny_vision_model("qwen3_vl"))]
    shards = pack(samples, num_shards=2, max_tokens=max(len(sample.token_ids) for sample in samples)).shards
    for shard, found in zip(shards, run_ranks(events, 2, str(folder), shards), strict=True):
        assert len(shard) > 1
        expected = [["read", "look"] if batch.image_refs else ["look"] for batch in shard]
        assert found == [event for one in expected for event in one]


def skipped(folder: str, step, bundle: str, weight: str, engine, teacher: str = "") -> None:
    """A step that a NaN in a weight spoils.

    Args:
        teacher: the role of a second model, of the same folder, that it learns from.
    """
    worker = build(folder, engine=EngineConfig(**engine))
    if teacher:
        build(folder, role=teacher, engine=EngineConfig(**engine).frozen(), worker=worker)
        worker.use_loss("policy", LossSource.of("distillation", DistillationConfig()).model_dump_json())
    parameters_of(worker)[weight].data.to_local().view(-1)[0] = torch.nan
    shard = dist.get_rank() // engine.get("ulysses_size", 1)
    worker.train(step.shards[shard], step.denominators, "policy", teacher, bundle)


def test_a_bundle_has_the_images_that_other_ranks_looked_at(run_ranks, folder, tmp_path):
    samples = [as_image_refs(sample, folder) for sample in vision_samples(tiny_vision_model("qwen3_vl"))]
    step = pack(samples, num_shards=1, max_tokens=256)
    weight = "model.language_model.norm.weight"
    run_ranks(skipped, 2, str(folder), step, str(tmp_path / "step_1"), weight, {"ulysses_size": 2})
    (written,) = run_ranks(read_bundle, 1, str(tmp_path / "step_1"))
    (batch,) = step.shards[0]
    expected = ImageReader.load(folder).read(batch.image_refs)
    assert torch.equal(written.images.pixel_values, expected.pixel_values)
    assert torch.equal(written.images.sizes, expected.sizes)


def read_bundle(path: str) -> TokenBatch:
    (found,) = Bundle.read(path).micro_batches()
    return found.tokens


LORA = {"rank": 2, "target_modules": ["q_proj", "linear_fc1"]}
BUNDLES = {
    "two ranks": (2, 2, "model.visual.blocks.1.mlp.linear_fc1.weight", {}),
    "shared packs": (2, 1, "model.visual.merger.linear_fc2.bias", {"ulysses_size": 2}),
    "adapters": (1, 1, "model.visual.blocks.1.mlp.linear_fc1.lora_B.default.weight", {"lora": LORA}),
}
"""Ranks, shards, what is NaN, and the engine."""


@pytest.mark.parametrize(
    ("kind", "teacher"), [*((kind, "") for kind in BUNDLES), ("two ranks", "teacher"), ("shared packs", "teacher")]
)
def test_a_step_with_images_is_replayed_on_one_process(run_ranks, folder, tmp_path, kind, teacher):
    """The fault is where pixels are looked at: without them, or with others in their place, it would be elsewhere. A
    teacher sees them too."""
    num_ranks, num_shards, weight, engine = BUNDLES[kind]
    samples = [as_image_refs(sample, folder) for sample in vision_samples(tiny_vision_model("qwen3_vl"))]
    step, path = pack(samples, num_shards=num_shards, max_tokens=40), str(tmp_path / "step_1")
    run_ranks(skipped, num_ranks, str(folder), step, path, weight, engine, teacher)
    ((is_reproduced, module),) = run_ranks(replayed, 1, path)
    assert is_reproduced
    assert module.startswith(weight.partition(".lora_B")[0].rpartition(".linear")[0])


def replayed(path: str) -> tuple[bool, str]:
    (_, fault), *_ = Bundle.read(path).step.faults
    return replay(path, torch.device("cpu")), fault.module


@pytest.mark.parametrize("engine", ["embedded", pytest.param("process", marks=pytest.mark.full)])
def test_what_is_sampled_depends_on_the_images_as_training_does(run_ranks, folder, engine):
    """A rank reads the images of the requests that it gets, for an engine in a process of its own too; the logprobs
    that it samples with are those that it trains with."""
    samples = [as_image_refs(sample, folder) for sample in vision_samples(tiny_vision_model("qwen3_vl"))]
    options = {"type": "embedded", "process": {}} if engine == "process" else engine
    (found,) = run_ranks(sampled_and_scored, 1, str(folder), samples, options)
    for sampled, trained in found:
        torch.testing.assert_close(sampled, trained, atol=1e-5, rtol=1e-5)


def sampled_and_scored(folder: str, samples: list[Sample], engine) -> list[tuple[torch.Tensor, torch.Tensor]]:
    worker = Worker(torch.device("cpu"))
    model = ModelConfig(path=folder).model_dump_json()
    worker.build_engine("policy", source(folder, EngineConfig().frozen()))
    worker.build_rollout(model, SamplingConfig(engine=engine).model_dump_json(), "float32")
    requests = [
        GenerateRequest(
            uid=sample.uid,
            prompt_ids=sample.token_ids.tolist(),
            max_tokens=5,
            temperature=1.0,
            image_refs=sample.image_refs,
        )
        for sample in samples
    ]
    groups = [
        RolloutGroup(
            example=Example(
                uid=sample.uid,
                prompt_ids=sample.token_ids.tolist(),
                prompt="?",
                data_source="a",
                ground_truth="",
                image_refs=sample.image_refs,
                position_ids=sample.position_ids,
            ),
            completions=completions,
            texts=[""],
            answers=[""],
            rewards=[0.0],
            reward_parts=[{}],
            failures=[None],
        )
        for sample, completions in zip(samples, worker.generate(requests), strict=True)
    ]
    trained = to_samples(groups)
    ((batch,),) = pack(trained, num_shards=1, max_tokens=512).shards
    (scores,) = worker.score([batch], "policy", True)
    worker.close()
    parts = dict(zip(batch.sample_index, scores.split(batch.cu_seqlens.diff().tolist()), strict=True))
    return [(one.rollout_logprobs, parts[place] * one.loss_mask) for place, one in enumerate(trained)]


def test_an_image_that_one_rank_cannot_read_is_an_error_on_both(run_ranks, folder):
    samples = [as_image_refs(sample, folder) for sample in vision_samples(tiny_vision_model("qwen3_vl"))]
    shards = pack(samples, num_shards=2, max_tokens=40).shards
    broken = next(batch for batch in shards[1] if batch.image_refs)
    image_ref = broken.image_refs[0]
    broken.image_refs[0] = replace(image_ref, data=image_ref.data[: len(image_ref.data) // 2])
    with pytest.raises(RankError) as error:
        run_ranks(scored, 2, str(folder), shards)
    assert str(error.value).count(f"DataError: rank 1: {image_ref.name} is damaged: ") == 2


def test_a_bundle_keeps_the_images_of_a_micro_batch():
    samples = vision_samples(tiny_vision_model("qwen3_vl"))
    [[batch]] = pack(samples, num_shards=1, max_tokens=256).shards
    record = MicroBatchRecord(sample_index=batch.sample_index, uids=batch.uids, loss=0.0)
    found = _batch(dict(_named_tensors(batch)), record)
    assert torch.equal(found.position_ids, batch.position_ids)
    assert torch.equal(found.images.pixel_values, batch.images.pixel_values)
    assert torch.equal(found.images.sizes, batch.images.sizes)
    words = replace(batch, images=None)
    assert _batch(dict(_named_tensors(words)), record).images is None
