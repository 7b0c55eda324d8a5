"""A worker's engines together: the trainer and the rollout engine give the same tokens the same logprobs."""

import functools
import json
import operator

import pytest
import torch
from tiny_models import tiny_folder

from shardwise.config import (
    AlgorithmConfig,
    EngineConfig,
    FrozenEngineConfig,
    GenerationConfig,
    ModelConfig,
    OptimizerConfig,
)
from shardwise.controller.process_group import Rank, process_group
from shardwise.data import pack, unpack
from shardwise.recipes.workers import Worker
from shardwise.types import GenerateRequest, Sample

FAMILIES = ["qwen3", "llama", "gemma2"]
REQUESTS = [
    GenerateRequest(
        uid=f"{i}", prompt_ids=[3 + i, 9, 40][: 1 + i % 3], num_completions=3, max_tokens=10, temperature=0.8
    )
    for i in range(4)
]


@pytest.fixture(autouse=True)
def group():
    with process_group(Rank(0, 1, 0), device_type="cpu", timeout_seconds=60):
        yield


def build(family, folder, *, param_dtype="float32", learning_rate=0.02) -> Worker:
    model = ModelConfig(path=str(tiny_folder(family, folder / family))).model_dump_json()
    engine = EngineConfig(param_dtype=param_dtype).model_dump_json()
    worker = Worker(torch.device("cpu"))
    worker.build_policy(model, engine, OptimizerConfig(learning_rate=learning_rate).model_dump_json(), 4, 0)
    worker.build_reference(model, FrozenEngineConfig(param_dtype=param_dtype).model_dump_json())
    worker.build_rollout(model, GenerationConfig(max_concurrent_sequences=5).model_dump_json(), param_dtype)
    worker.use_policy_loss(AlgorithmConfig(clip_low=0.5).model_dump_json(), 0.8)
    return worker


def roll_out(worker: Worker) -> list[Sample]:
    samples = []
    for request, group in zip(REQUESTS, worker.generate(REQUESTS), strict=True):
        for completion in group:
            token_ids = torch.tensor(request.prompt_ids + completion.token_ids)
            place = torch.arange(len(token_ids)) - len(request.prompt_ids)
            logprobs = torch.zeros(len(token_ids))
            logprobs[place >= 0] = torch.tensor(completion.logprobs)
            samples.append(
                Sample(
                    uid=request.uid,
                    token_ids=token_ids,
                    loss_mask=place >= 0,
                    rollout_logprobs=logprobs,
                    advantages=torch.where(place >= 0, 1.0 - 2.0 * (len(samples) % 2), 0.0),
                    max_policy_version=completion.policy_version,
                )
            )
    return samples


def trainer_logprobs(worker: Worker, samples: list[Sample], method="policy_logprobs") -> list[torch.Tensor]:
    packed = pack(samples, num_shards=1, max_tokens=40)
    assert len(packed.shards[0]) > 2  # several micro-batches, so packing is part of the comparison
    return unpack(packed, [getattr(worker, method)(packed.shards[0])])


def largest_difference(worker: Worker, samples: list[Sample]) -> float:
    pairs = zip(trainer_logprobs(worker, samples), samples, strict=True)
    return max(float((values - sample.rollout_logprobs).abs().max()) for values, sample in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_and_trainer_agree_before_and_after_a_sync_that_follows_a_step(family, tmp_path):
    """1e-4 nats in float32 at temperature 0.8; between step and sync they differ by a hundred times as much."""
    worker = build(family, tmp_path)
    before = roll_out(worker)
    assert largest_difference(worker, before) < 1e-4

    worker.sync_weights(1)
    assert [s.token_ids.tolist() for s in roll_out(worker)] == [s.token_ids.tolist() for s in before]

    packed = pack(before, num_shards=1, max_tokens=40)
    metrics = worker.train(packed.shards[0], packed.denominators)
    assert metrics["train/grad_norm"].result() > 0
    assert largest_difference(worker, roll_out(worker)) > 1e-2

    worker.sync_weights(2)
    after = roll_out(worker)
    assert largest_difference(worker, after) < 1e-4
    assert {sample.max_policy_version for sample in after} == {2}
    assert [s.token_ids.tolist() for s in after] != [s.token_ids.tolist() for s in before]


@pytest.mark.parametrize("family", ["qwen3", "llama"], ids=["tied", "untied"])
def test_one_changed_weight_is_in_the_next_completion(family, tmp_path):
    worker = build(family, tmp_path)
    worker.sync_weights(1)
    before = [c.logprobs for group in worker.generate(REQUESTS) for c in group]
    weight = worker._policy._model.hf_model.get_output_embeddings().weight.to_local()
    with torch.no_grad():
        weight[77, 5] += 3.0
    worker.sync_weights(2)
    changed = roll_out(worker)
    assert [c.logprobs for group in worker.generate(REQUESTS) for c in group] != before
    assert largest_difference(worker, changed) < 1e-4
    with torch.no_grad():
        weight[77, 5] -= 3.0
    worker.sync_weights(3)
    again = [c.logprobs for group in worker.generate(REQUESTS) for c in group]
    torch.testing.assert_close(
        functools.reduce(operator.iadd, again, []), functools.reduce(operator.iadd, before, []), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(("param_dtype", "bytes_per_weight"), [("float32", 4), ("bfloat16", 2)])
def test_a_sync_moves_every_weight_once_in_the_compute_dtype(param_dtype, bytes_per_weight, tmp_path):
    worker = build("qwen3", tmp_path, param_dtype=param_dtype)
    assert worker.sync_weights(1) == worker._policy.num_parameters * bytes_per_weight


def test_bfloat16_rollout_and_trainer_agree_to_its_precision(tmp_path):
    """bfloat16 has 8 bits, so logits of a few units agree to a few hundredths; on average better than 0.01."""
    worker = build("llama", tmp_path, param_dtype="bfloat16")
    worker.sync_weights(1)
    samples = roll_out(worker)
    pairs = zip(trainer_logprobs(worker, samples), samples, strict=True)
    differences = torch.cat([(values - s.rollout_logprobs)[s.loss_mask].abs() for values, s in pairs])
    assert float(differences.mean()) < 0.01
    assert float(differences.max()) < 0.1


def test_the_reference_stays_where_the_policy_started(tmp_path):
    worker = build("llama", tmp_path)
    samples = roll_out(worker)
    start = torch.cat(trainer_logprobs(worker, samples))
    torch.testing.assert_close(torch.cat(trainer_logprobs(worker, samples, "reference_logprobs")), start)
    packed = pack(samples, num_shards=1, max_tokens=40)
    worker.train(packed.shards[0], packed.denominators)
    moved = torch.cat(trainer_logprobs(worker, samples))
    assert float((moved - start).abs().max()) > 1e-2
    torch.testing.assert_close(torch.cat(trainer_logprobs(worker, samples, "reference_logprobs")), start)


def bytes_on_device(engine) -> tuple[int, int]:
    """Of the weights, and of the optimizer's states."""
    return tuple(
        sum(storage.nbytes() for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())
        for tensors in (
            [parameter.to_local() for parameter in engine._model.parameters()],
            list(engine._optimizer.state_tensors()) if engine._optimizer else [],
        )
    )


def test_the_policy_is_away_whenever_another_engine_works_and_saving_does_not_bring_it_back(tmp_path, monkeypatch):
    """Trap 27, in the order of reinforcement learning: score, reference, train, sync, save, sample."""
    folder = tiny_folder("llama", tmp_path / "llama")
    model = ModelConfig(path=str(folder)).model_dump_json()
    engine = EngineConfig(param_offload=True, optimizer_offload=True)
    worker = Worker(torch.device("cpu"))
    worker.build_policy(model, engine.model_dump_json(), OptimizerConfig(learning_rate=0.02).model_dump_json(), 4, 0)
    worker.build_reference(model, engine.frozen().model_dump_json())
    worker.build_rollout(model, GenerationConfig(max_concurrent_sequences=5).model_dump_json(), "float32")
    worker.use_policy_loss(AlgorithmConfig(clip_low=0.5).model_dump_json(), 0.8)
    worker.sync_weights(0)
    seen = {}

    def watched(owner, name):
        original = getattr(owner, name)

        def run(*args, **kwargs):
            seen[owner, name] = bytes_on_device(worker._policy)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    watched(worker._reference, "forward")
    watched(worker._rollout, "generate")
    samples = roll_out(worker)
    assert seen[worker._rollout, "generate"] == (0, 0)
    trainer_logprobs(worker, samples)
    assert bytes_on_device(worker._policy)[0] > 0
    trainer_logprobs(worker, samples, "reference_logprobs")
    assert seen[worker._reference, "forward"] == (0, 0)
    assert bytes_on_device(worker._reference)[0] == 0
    packed = pack(samples, num_shards=1, max_tokens=40)
    worker.train(packed.shards[0], packed.denominators)
    weights, states = bytes_on_device(worker._policy)
    assert states == 2 * weights > 0
    worker.sync_weights(1)
    worker._policy.export_hf = lambda *_: None
    monkeypatch.setattr("shardwise.recipes.workers.load_tokenizer", lambda _: None)
    worker.save_weights(str(tmp_path / "step"), model)
    roll_out(worker)
    assert seen[worker._rollout, "generate"] == (0, 0)


def test_supervised_training_is_the_default_and_at_temperature_one(tmp_path):
    worker = Worker(torch.device("cpu"))
    model = ModelConfig(path=str(tiny_folder("llama", tmp_path))).model_dump_json()
    worker.build_policy(model, EngineConfig().model_dump_json(), OptimizerConfig().model_dump_json(), 1, 0)
    samples = [
        Sample(uid="a", token_ids=torch.tensor([4, 9, 30, 2]), loss_mask=torch.tensor([False, False, True, True])),
        Sample(uid="b", token_ids=torch.tensor([50, 9]), loss_mask=torch.tensor([False, True])),
    ]
    packed = pack(samples, num_shards=1, max_tokens=10)
    (logprobs,) = worker.policy_logprobs(packed.shards[0])
    metrics = worker.train(packed.shards[0], packed.denominators)
    assert metrics["train/loss"].result() == pytest.approx(-float(logprobs.sum()) / 3, rel=1e-6)


def test_close_drops_the_engines_and_the_policy_loss(tmp_path):
    worker = build("llama", tmp_path)
    worker.close()
    assert worker._temperature == 1.0
    for method in ("generate", "policy_logprobs", "reference_logprobs"):
        with pytest.raises(AssertionError):
            getattr(worker, method)([])


def test_num_parameters_count_tied_weights_once(tmp_path):
    folder = tiny_folder("qwen3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    hidden, heads, kv, dim, mlp = (
        config[name]
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    )
    layer = 2 * hidden * heads * dim + 2 * hidden * kv * dim + 3 * hidden * mlp + 2 * hidden + 2 * dim
    expected = config["vocab_size"] * hidden + config["num_hidden_layers"] * layer + hidden
    model = ModelConfig(path=str(folder)).model_dump_json()
    worker = Worker(torch.device("cpu"))
    assert (
        worker.build_policy(model, EngineConfig().model_dump_json(), OptimizerConfig().model_dump_json(), 1, 0)[0]
        == expected
    )
