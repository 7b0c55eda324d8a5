"""After a sync the trainer and the rollout engine give the same tokens the same logprobs."""

import functools
import operator
import os
import signal
from dataclasses import replace

import pytest
import torch
from small_workers import REQUESTS, build, engine_of, largest_difference, roll_out, train, trainer_logprobs

from shardwise.checksum import checksums
from shardwise.data import pack, unpack
from shardwise.recipes.weight_sync import MEAN_DIFFERENCE_BOUNDS
from shardwise.region import Region
from shardwise.rollout import VllmEngine

pytestmark = pytest.mark.usefixtures("alone")


FAMILIES = ["qwen3", "llama", "gemma2"]


ADAPTERS = {
    "plain": {"rank": 4},
    "dora": {"rank": 4, "use_dora": True},
    "with modules": {"rank": 2, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "conv1d": {"rank": 4},
    "experts": {"rank": 2, "target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
    "router in float32": {"rank": 4, "target_modules": ["o_proj", "kv_b_proj"], "modules_to_save": ["gate"]},
}


@pytest.mark.parametrize(
    ("kind", "param_dtype", "bound"),
    [
        *((kind, "float32", 1e-4) for kind in ADAPTERS),
        *((kind, "bfloat16", 0.05) for kind in ADAPTERS if kind != "experts"),  # grouped_mm wants rows of 16 bytes
    ],
)
def test_trap_11_an_adapter_that_is_synced_alone_changes_what_is_sampled_as_training_did(
    kind, param_dtype, bound, tmp_path
):
    lora = dict(ADAPTERS[kind])
    if kind == "with modules":
        lora["modules_to_save"] = ["lm_head", "norm"]
    family = {"conv1d": "gpt2", "experts": "qwen3_moe", "router in float32": "deepseek_v3"}.get(kind, "llama")
    worker = build(family, tmp_path, param_dtype=param_dtype, lora=lora)
    worker.sync_adapter_only()
    worker.sync_weights(1)
    before = roll_out(worker)
    assert largest_difference(worker, before) < bound
    train(worker, before)
    assert largest_difference(worker, roll_out(worker)) > 1e-2
    receipt = worker.sync_weights(2)
    assert largest_difference(worker, roll_out(worker)) < bound
    engine = engine_of(worker)
    bytes_per_weight = {"float32": 4, "bfloat16": 2}[param_dtype]
    kept = 4 * 32 * (4 - bytes_per_weight) + 4 * 4 if kind == "router in float32" else 0  # its weight and its bias
    assert receipt["num_bytes_moved"] == engine.num_trained_parameters * bytes_per_weight + kept
    assert receipt["num_proven"] == receipt["num_tensors"] >= 10
    assert engine.num_trained_parameters < engine.num_parameters / 2


class PartOfVllm(VllmEngine):
    """Serves the first half of the rows of every matrix, as one rank of two would; keeps what it is given."""

    def __init__(self, forms) -> None:
        self.whole = dict(forms)
        self.given = {}

    is_part = True

    def needed_regions(self):
        halves = {name: (form.shape[0] // 2, *form.shape[1:]) for name, form in self.whole.items() if form.dim() > 1}
        return {name: Region.whole(shape) for name, shape in halves.items()}

    def served_weights(self):
        needed = self.needed_regions()
        return ((n, needed[n].of(form) if n in needed else form) for n, form in self.whole.items())

    def served_checksums(self):
        return checksums(self.given.items())

    def load_weights(self, weights) -> None:
        self.given = {name: tensor.clone() for name, tensor in weights}

    def commit_weights(self, version) -> None:
        self.version = version

    def wake(self, *parts) -> None:
        pass

    sleep = close = wake


def test_an_engine_of_several_ranks_is_sent_what_its_part_needs(tmp_path):
    worker = build("llama", tmp_path)
    weights = dict(engine_of(worker).named_weights(torch.float32))
    engine = PartOfVllm((name, tensor.to("meta")) for name, tensor in weights.items())
    worker.engines.rollout_engine = engine
    receipt = worker.sync_weights(3)
    assert (engine.version, receipt["num_proven"]) == (3, len(weights))
    assert engine.given.keys() == weights.keys()
    for name, whole in weights.items():
        expected = whole[: len(whole) // 2] if whole.dim() > 1 else whole
        assert torch.equal(engine.given[name], expected), name
    assert 0.5 < receipt["num_bytes"] / sum(whole.nbytes for whole in weights.values()) < 0.55


@pytest.mark.full
def test_an_adapter_is_synced_alone_to_an_engine_in_a_process_of_its_own(tmp_path):
    worker = build("llama", tmp_path, lora={"rank": 4}, engine={"process": {}})
    try:
        worker.sync_adapter_only()
        worker.sync_weights(1)
        train(worker, roll_out(worker))
        receipt = worker.sync_weights(2)
        assert receipt["num_proven"] == receipt["num_tensors"]
        assert receipt["num_bytes_moved"] == engine_of(worker).num_trained_parameters * 4
        os.kill(worker.engines.rollout_engine.pid, signal.SIGKILL)
        assert largest_difference(worker, roll_out(worker)) < 1e-4
        assert worker.take_restarts() == 1
    finally:
        worker.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_and_trainer_agree_before_and_after_a_sync_that_follows_a_step(family, tmp_path):
    """1e-4 nats in float32 at temperature 0.8; between step and sync they differ by a hundred times as much."""
    worker = build(family, tmp_path)
    before = roll_out(worker)
    assert largest_difference(worker, before) < 1e-4

    worker.sync_weights(1)
    assert [s.token_ids.tolist() for s in roll_out(worker)] == [s.token_ids.tolist() for s in before]

    metrics = train(worker, before)
    assert metrics["train/grad_norm"].result() > 0
    assert largest_difference(worker, roll_out(worker)) > 1e-2

    worker.sync_weights(2)
    after = roll_out(worker)
    assert largest_difference(worker, after) < 1e-4
    assert {completion.policy_version for group in worker.generate(REQUESTS) for completion in group} == {2}
    assert [s.token_ids.tolist() for s in after] != [s.token_ids.tolist() for s in before]


@pytest.mark.parametrize("family", ["qwen3", "llama"], ids=["tied", "untied"])
def test_one_changed_weight_is_in_the_next_completion(family, tmp_path):
    worker = build(family, tmp_path)
    worker.sync_weights(1)
    before = [c.logprobs for group in worker.generate(REQUESTS) for c in group]
    weight = engine_of(worker)._model.hf_model.get_output_embeddings().weight.to_local()
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
def test_trap_29_a_sync_moves_every_weight_once_in_the_compute_dtype(param_dtype, bytes_per_weight, tmp_path):
    worker = build("qwen3", tmp_path, param_dtype=param_dtype)
    assert worker.sync_weights(1)["num_bytes"] == engine_of(worker).num_parameters * bytes_per_weight


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_f39_the_probe_finds_rounding_after_a_sync_and_a_difference_before_it(family, param_dtype, tmp_path):
    """Rounding stays below a third of the bound; one step at a learning rate of 0.02 is far above it."""
    worker = build(family, tmp_path, param_dtype=param_dtype)
    worker.sync_weights(1)
    samples = roll_out(worker)
    sequences = [sample.token_ids.tolist() for sample in samples]

    def mean_difference() -> float:
        packed = pack(samples, num_shards=1, max_tokens=40)
        trainer = unpack(packed, [worker.score(packed.shards[0], "policy", True, 1.0)])
        rollout = worker.rollout_logprobs(sequences, [[]] * len(sequences))
        pairs = zip(trainer, rollout, strict=True)
        return float(torch.cat([(values[1:] - torch.tensor(row)).abs() for values, row in pairs]).mean())

    scored = [replace(sample, loss_mask=torch.arange(len(sample.token_ids)) > 0) for sample in samples]
    trained, samples = samples, scored
    bound = MEAN_DIFFERENCE_BOUNDS[param_dtype]
    assert mean_difference() < bound / 3
    train(worker, trained)
    assert mean_difference() > 2 * bound
    worker.sync_weights(2)
    assert mean_difference() < bound / 3


def test_bfloat16_rollout_and_trainer_agree_to_its_precision(tmp_path):
    """bfloat16 has 8 bits, so logits of a few units agree to a few hundredths; on average better than 0.01."""
    worker = build("llama", tmp_path, param_dtype="bfloat16")
    worker.sync_weights(1)
    samples = roll_out(worker)
    pairs = zip(trainer_logprobs(worker, samples), samples, strict=True)
    differences = torch.cat([(values - s.rollout_logprobs)[s.loss_mask].abs() for values, s in pairs])
    assert float(differences.mean()) < 0.01
    assert float(differences.max()) < 0.1
