"""A worker's engines together: the trainer and the rollout engine give the same tokens the same logprobs."""

import functools
import json
import operator
import os
import signal
import struct
from dataclasses import replace

import pytest
import torch
import xxhash
from forgetful_engine import ForgetfulEngine
from safetensors.torch import load_file, save_file
from tiny_models import reference_logprobs, tiny_folder, tiny_model
from transformers import AutoModelForSequenceClassification

from shardwise.config import (
    AlgorithmConfig,
    ConfigError,
    CriticConfig,
    DistillationConfig,
    EngineConfig,
    ModelConfig,
    ModelError,
    OptimizerConfig,
    SamplingConfig,
    TrainingError,
)
from shardwise.controller.process_group import Rank, process_group
from shardwise.data import pack, unpack
from shardwise.recipes.checkpointing.manifest import write_manifest
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.rank.worker import Worker
from shardwise.recipes.sync import MEAN_DIFFERENCE_BOUNDS
from shardwise.rollout import EmbeddedEngine
from shardwise.types import GenerateRequest, Sample, SampledSpan

FAMILIES = ["qwen3", "llama", "gemma2"]
REQUESTS = [
    GenerateRequest(
        uid=f"{i}", prompt_ids=[3 + i, 9, 40][: 1 + i % 3], num_completions=3, max_tokens=10, temperature=0.8
    )
    for i in range(4)
]


@pytest.fixture(autouse=True)
def group(monkeypatch):
    monkeypatch.setattr("shardwise.recipes.rank.worker.load_tokenizer", lambda _: Tokenizer())
    with process_group(Rank(0, 1, 0), device_type="cpu", timeout_seconds=60):
        yield


OPTIMIZER = OptimizerConfig(learning_rate=0.02)


def test_a_model_beside_the_policy_that_no_rank_can_build_is_named_and_the_error_stays_a_shared_one(tmp_path):
    folder = tiny_folder("qwen3", tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(
        ModelError, match=r"^the critic, which has the options of `engine` unless it is given its own: "
    ) as raised:
        build_one(Worker(torch.device("cpu")), "critic", folder, EngineConfig(), optimizer=OPTIMIZER)
    assert raised.value.is_shared


def test_trained_weights_of_a_model_beside_the_policy_that_cannot_be_loaded_are_named(tmp_path):
    folder = tiny_folder("qwen3", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    worker = Worker(torch.device("cpu"))
    for role, named in (("critic", r"^the critic, which has the options of `engine` unless it is given its own: .*"),
                        ("policy", r"^(?!the policy).*")):  # fmt: skip
        build_one(worker, role, folder, EngineConfig(), optimizer=OPTIMIZER, with_trained=False)
        with pytest.raises(ModelError, match=f"{named}model.norm.weight"):
            worker.load_initial_weights(role)


def test_what_the_policy_freezes_and_a_critic_lacks_is_told_as_the_critics(tmp_path):
    """A critic without options of its own takes those of the policy."""
    folder, layout = tiny_folder("qwen3", tmp_path), EngineConfig(freeze_module_prefix=["lm_head"])
    worker = Worker(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"^the critic, which has the options of .*'lm_head' names no"):
        build_one(worker, "critic", folder, layout, optimizer=OPTIMIZER, head="token_values")


def build_one(
    worker, role, folder, layout, *, optimizer=None, head="logprobs", temperature=1.0, total_steps=4, with_trained=True
):
    source = EngineSource(model=ModelConfig(path=str(folder)), layout=layout, head=head, temperature=temperature)
    given = "" if optimizer is None else optimizer.model_dump_json()
    return worker.build_engine(role, source.model_dump_json(), given, total_steps, with_trained)


def build(family, folder, *, param_dtype="float32", temperature=0.8, lora=None, engine="embedded") -> Worker:
    path = tiny_folder(family, folder / family)
    layout = EngineConfig(param_dtype=param_dtype, lora=lora)
    worker = Worker(torch.device("cpu"))
    build_one(worker, "policy", path, layout, optimizer=OPTIMIZER, temperature=temperature)
    build_one(worker, "reference", path, layout.frozen(), temperature=temperature)
    worker.build_rollout(
        ModelConfig(path=str(path)).model_dump_json(),
        SamplingConfig(max_concurrent_sequences=5, engine=engine).model_dump_json(),
        param_dtype,
        "" if layout.lora is None else layout.lora.model_dump_json(),
    )
    worker.use_loss(
        "policy",
        "policy",
        AlgorithmConfig(policy_loss={"clip_low": 0.5}, num_epochs=2).model_dump_json(),
        {"kl_coef": 0},
    )
    return worker


def engine_of(worker, role="policy"):
    return worker._engines[role].engine


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
                )
            )
    return samples


def test_what_a_rank_samples_carries_where_it_is_and_what_it_followed(tmp_path):
    worker = build("llama", tmp_path)
    going_on = replace(REQUESTS[1], num_completions=1, partial_token_ids=[7, 8])
    for request, group in zip([*REQUESTS, going_on], worker.generate([*REQUESTS, going_on]), strict=True):
        read = request.prompt_ids + request.partial_token_ids
        for completion in group:
            whole = read + completion.token_ids
            digest = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(whole)}q", *whole))
            assert completion.spans == [SampledSpan(start=len(read), end=len(whole), digest=digest)]


def trainer_logprobs(worker: Worker, samples: list[Sample], role="policy") -> list[torch.Tensor]:
    packed = pack(samples, num_shards=1, max_tokens=40)
    assert len(packed.shards[0]) > 2  # several micro-batches, so packing is part of the comparison
    return unpack(packed, [worker.score(packed.shards[0], role, True)])


def train(worker: Worker, samples: list[Sample], role="policy"):
    packed = pack(samples, num_shards=1, max_tokens=40)
    return worker.train(packed.shards[0], packed.denominators, role, "")


def largest_difference(worker: Worker, samples: list[Sample]) -> float:
    pairs = zip(trainer_logprobs(worker, samples), samples, strict=True)
    return max(float((values - sample.rollout_logprobs).abs().max()) for values, sample in pairs)


ADAPTERS = {
    "plain": {"rank": 4},
    "dora": {"rank": 4, "use_dora": True},
    "with modules": {"rank": 2, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "conv1d": {"rank": 4},
    "experts": {"rank": 2, "target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
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
    family = {"conv1d": "gpt2", "experts": "qwen3_moe"}.get(kind, "llama")
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
    assert receipt["num_bytes_moved"] == engine.num_trained_parameters * bytes_per_weight
    assert receipt["num_proven"] == receipt["num_tensors"] >= 10
    assert engine.num_trained_parameters < engine.num_parameters / 2


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
        os.kill(worker._rollout_engine.pid, signal.SIGKILL)
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


def test_the_reference_stays_where_the_policy_started(tmp_path):
    worker = build("llama", tmp_path)
    samples = roll_out(worker)
    start = torch.cat(trainer_logprobs(worker, samples))
    torch.testing.assert_close(torch.cat(trainer_logprobs(worker, samples, "reference")), start)
    train(worker, samples)
    moved = torch.cat(trainer_logprobs(worker, samples))
    assert float((moved - start).abs().max()) > 1e-2
    torch.testing.assert_close(torch.cat(trainer_logprobs(worker, samples, "reference")), start)


def test_weights_that_sleeping_dropped_are_brought_again_before_anything_is_sampled(tmp_path):
    """Between a sync and the next sampling come a probe, a save and other engines, as in a run."""
    kept, worker = build("llama", tmp_path / "kept"), build("llama", tmp_path / "dropped")
    worker._rollout_engine = ForgetfulEngine(worker._rollout_engine)
    for each in (kept, worker):
        each.sync_weights(1)
        train(each, roll_out(each))
        each.sync_weights(2)
    samples = roll_out(kept)
    assert largest_difference(worker, samples) < 1e-4  # the trainer works, and the engine sleeps
    sequences = [sample.token_ids.tolist() for sample in samples]
    for _ in range(2):
        assert worker.rollout_logprobs(sequences, [[]] * len(sequences)) == kept.rollout_logprobs(
            sequences, [[]] * len(sequences)
        )
        worker.save("policy", ModelConfig(path=str(tmp_path)).model_dump_json(), str(tmp_path / "saved"))
        trainer_logprobs(worker, samples, "reference")
        assert worker.generate(REQUESTS) == kept.generate(REQUESTS)
        assert {group[0].policy_version for group in worker.generate(REQUESTS)} == {2}
        largest_difference(worker, samples)
    assert worker._rollout_engine.num_syncs > 4 <= worker._rollout_engine.num_dropped


def test_the_embedded_engine_sleeps_while_the_trainer_works_and_samples_the_same(tmp_path, monkeypatch):
    """On a CPU, where settings cannot ask for it."""
    resident, worker = build("llama", tmp_path / "resident"), build("llama", tmp_path / "sleeping")
    there = []
    for level, each in enumerate((resident, worker)):
        model = each._rollout_engine._model
        for weight in model.parameters():
            weight.data = weight.data.clone()  # as on a device: not mapped from the file, which cannot be freed
        each._rollout_engine = EmbeddedEngine(model, max_rows=5, device=torch.device("cpu"), sleep_level=level)

    def watch_rollout(owner, name):
        original = getattr(owner, name)

        def run(*args, **kwargs):
            weights = [weight.untyped_storage().nbytes() for _, weight in worker._rollout_engine.served_weights()]
            there.append((name, all(weights), any(weights)))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    for name in ("forward", "forward_backward", "named_weights"):
        watch_rollout(engine_of(worker), name)
    watch_rollout(worker._rollout_engine, "generate")
    for number in range(2):
        samples = [roll_out(each) for each in (resident, worker)]
        for one, other in zip(*samples, strict=True):
            assert torch.equal(one.token_ids, other.token_ids)
            torch.testing.assert_close(one.rollout_logprobs, other.rollout_logprobs, atol=1e-5, rtol=1e-5)
        if number == 0:  # once: weights that were hashed on a CPU cannot be freed either
            for each, own in zip((resident, worker), samples, strict=True):
                trainer_logprobs(each, own)
                train(each, own)
                each.sync_weights(1)
    here, away = (True, True), (False, False)
    assert there == [
        ("generate", *here),
        ("forward", *away),
        ("forward_backward", *away),
        ("named_weights", *here),
        ("generate", *here),
    ]


def test_weights_of_a_policy_that_was_trained_since_are_not_brought_as_those_that_sleeping_dropped(tmp_path):
    worker = build("llama", tmp_path)
    worker._rollout_engine = ForgetfulEngine(worker._rollout_engine)
    worker.sync_weights(1)
    train(worker, roll_out(worker))
    with pytest.raises(TrainingError, match="sleep_level=2 dropped the weights, and no weight sync came since"):
        worker.generate(REQUESTS)
    worker.sync_weights(2)
    assert worker.generate(REQUESTS)


ROLES = {"policy": "logprobs", "reference": "logprobs", "critic": "token_values", "reward": "sequence_scores"}
AWAY = {"params": (0, 1), "optimizer": (1, 0), "both": (0, 0), "none": (1, 1)}
"""What is left on the device of (weights, optimizer states) by what is offloaded: 0 nothing, 1 all."""


@pytest.fixture(scope="module")
def everyone(tmp_path_factory):
    """The folder of a language model, and beside it that of a reward model (`scorer`) with the same backbone."""
    folder = tiny_folder("llama", tmp_path_factory.mktemp("everyone") / "llama")
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    scorer.save_pretrained(folder.parent / "scorer")
    return folder


def build_everyone(folder, offload: dict[str, str]) -> Worker:
    """The reference and the reward model are frozen."""
    worker = Worker(torch.device("cpu"))
    for role, head in ROLES.items():
        kind = offload.get(role, "none")
        layout = EngineConfig(param_offload=kind in ("params", "both"), optimizer_offload=kind in ("optimizer", "both"))
        is_trained = role in ("policy", "critic")
        build_one(
            worker,
            role,
            folder.parent / "scorer" if role == "reward" else folder,
            layout if is_trained else layout.frozen(),
            optimizer=OPTIMIZER if is_trained else None,
            head=head,
        )
    worker.build_rollout(
        ModelConfig(path=str(folder)).model_dump_json(),
        SamplingConfig(max_concurrent_sequences=5).model_dump_json(),
        "float32",
    )
    algorithm = AlgorithmConfig(policy_loss={"clip_low": 0.5}, num_epochs=2)
    worker.use_loss("policy", "policy", algorithm.model_dump_json(), {"kl_coef": 0})
    worker.use_loss("critic", "value", CriticConfig().model_dump_json(), {})
    worker.sync_weights(0)
    return worker


def with_values(worker, samples):
    """What a critic learns from."""
    values = score(worker, samples, "critic", max_tokens=40)
    return [replace(sample, values=v, returns=torch.where(sample.loss_mask, v + 1.0, 0.0)) for sample, v in
            zip(samples, values, strict=True)]  # fmt: skip


def watch(monkeypatch, worker):
    """(who, what) of everything that works on the device, and what of each engine is there at that moment."""
    seen = []

    def watched(owner, who, name):
        original = getattr(owner, name)

        def run(*args, **kwargs):
            seen.append((who, name, {role: bytes_on_device(engine_of(worker, role)) for role in ROLES}))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    for role in ROLES:
        for name in ("forward", "forward_backward", "optim_step", "named_weights"):
            watched(engine_of(worker, role), role, name)
    watched(worker._rollout_engine, "rollout", "generate")
    return seen


@pytest.mark.parametrize(
    "offload",
    [
        dict.fromkeys(ROLES, "both"),
        {"policy": "both"},
        {"policy": "params", "critic": "optimizer", "reward": "params"},
        {"reference": "params", "critic": "both"},
        {},
    ],
    ids=["all", "policy", "parts", "others", "none"],
)
def test_whoever_works_has_the_device_and_what_the_others_name_has_left_it(everyone, monkeypatch, offload):
    """Trap 27, in the order of reinforcement learning: sample, score with everyone, train both, sync, sample again.
    States that are offloaded are there only while their engine is trained."""
    worker = build_everyone(everyone, offload)
    whole = {}  # the bytes of each engine's weights, and of its optimizer's states once there are any
    for role in ROLES:
        engine = engine_of(worker, role)
        engine.onload("params", "optimizer")
        whole[role] = bytes_on_device(engine)
    seen = watch(monkeypatch, worker)
    samples = roll_out(worker)
    for role in ROLES:
        trainer_logprobs(worker, samples, role)
    samples = with_values(worker, samples)
    assert train(worker, samples, "critic")["train/grad_norm"].result() > 0
    assert train(worker, samples, "policy")["train/grad_norm"].result() > 0
    assert not engine_of(worker)._tensors("grads")
    worker.sync_weights(1)
    roll_out(worker)
    worker.push_weights(2, False)  # the part of a rank that gathers
    for role in ROLES:
        engine_of(worker, role).onload("params", "optimizer")
        whole[role] = bytes_on_device(engine_of(worker, role))
    assert all(weights > 0 for weights, _ in whole.values())
    assert {role for role in ROLES if whole[role][1] > 0} == {"policy", "critic"}

    assert [(who, name) for who, name, _ in seen] == [
        ("rollout", "generate"),
        *((role, "forward") for role in ROLES),
        ("critic", "forward"),
        *((role, name) for role in ("critic", "policy") for name in ("forward_backward", "optim_step")),
        ("policy", "named_weights"),
        ("rollout", "generate"),
        ("policy", "named_weights"),
    ]
    have_states = set()
    for who, name, there in seen:
        for role in ROLES:
            weights, states = there[role]
            full_weights, full_states = whole[role]
            if role not in have_states:
                full_states = 0
            keeps_weights, keeps_states = AWAY[offload.get(role, "none")]
            if role == who:
                keeps_weights = 1
                keeps_states |= name in ("forward_backward", "optim_step")
            expected = full_weights * keeps_weights, full_states * keeps_states
            assert (weights, states) == expected, (who, name, role)
        if name == "optim_step":
            have_states.add(who)


class Elsewhere:
    """An engine, as if it had an allocator of its own. Notes who has the device."""

    def __init__(self, engine, calls) -> None:
        self._engine, self._calls = engine, calls

    def sleep(self):
        self._calls.append("sleep")

    def wake(self, *parts):
        self._calls.append(("wake", *parts))

    def __getattr__(self, name):
        return getattr(self._engine, name)


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_what_is_free_goes_to_an_engine_elsewhere_before_it_wakes(everyone, monkeypatch, is_elsewhere):
    """Not between steps of training, and not where one allocator serves both."""
    worker, calls = build_everyone(everyone, {"policy": "both"}), []
    samples = roll_out(worker)
    train(worker, samples)
    if is_elsewhere:
        worker._rollout_engine = Elsewhere(worker._rollout_engine, calls)
    monkeypatch.setattr("shardwise.recipes.rank.worker.release_cached_blocks", lambda: calls.append("released"))
    offload = engine_of(worker).offload
    monkeypatch.setattr(
        engine_of(worker), "offload", lambda *parts: calls.append(("offload", *parts)) or offload(*parts)
    )
    train(worker, samples)
    worker.sync_weights(1)
    roll_out(worker)
    away = [("offload", "optimizer"), ("offload", "params", "optimizer")]
    if not is_elsewhere:
        assert calls == away
        return
    trained = ["sleep"]
    synced = [away[0], "released", "sleep", ("wake", "weights")]
    assert calls == [*trained, *synced, away[1], "released", ("wake", "weights", "kv_cache")]


def test_offloading_changes_no_number(everyone):
    """Three rounds of sampling, scoring and training end in the same weights."""
    found = []
    for offload in ({}, dict.fromkeys(ROLES, "both")):
        worker = build_everyone(everyone, offload)
        for version in (1, 2, 3):
            samples = with_values(worker, roll_out(worker))
            train(worker, samples, "critic")
            train(worker, samples, "policy")
            worker.sync_weights(version)
        found.append([torch.cat(trainer_logprobs(worker, samples, role)) for role in ROLES])
    for plain, moved in zip(*found, strict=True):
        assert plain.tolist() == moved.tolist()


def test_building_an_engine_makes_room_for_it(everyone, monkeypatch):
    """The weights of two models never need the device at once."""
    worker = Worker(torch.device("cpu"))
    layout = EngineConfig(param_offload=True)
    build_one(worker, "policy", everyone, layout, optimizer=OPTIMIZER)
    assert bytes_on_device(engine_of(worker))[0] > 0
    monkeypatch.setattr("shardwise.recipes.rank.worker.TrainEngine.build", lambda *_, **__: pytest.fail(
        "the policy is still there") if bytes_on_device(engine_of(worker))[0] else None)  # fmt: skip
    with pytest.raises(AttributeError):  # the fake builds nothing
        build_one(worker, "reference", everyone, layout.frozen())


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_saving_writes_the_engine_of_that_role_and_the_others_leave(everyone, tmp_path, role):
    worker = build_everyone(everyone, dict.fromkeys(ROLES, "both"))
    samples = with_values(worker, roll_out(worker))
    train(worker, samples, role)
    worker.save(role, ModelConfig(path=str(everyone)).model_dump_json(), str(tmp_path / "step_1"))
    others = {other: bytes_on_device(engine_of(worker, other))[0] for other in ROLES if other != role}
    assert others == dict.fromkeys(others, 0)
    after = torch.cat(trainer_logprobs(worker, samples, role))
    assert [path.name for path in (tmp_path / "step_1").iterdir()] == ["hf"]
    again = Worker(torch.device("cpu"))
    build_one(again, "saved", tmp_path / "step_1" / "hf", EngineConfig().frozen(), head=ROLES[role])
    torch.testing.assert_close(torch.cat(trainer_logprobs(again, samples, "saved")), after, atol=1e-6, rtol=1e-5)
    roll_out(worker)
    assert bytes_on_device(engine_of(worker, role)) == (0, 0), "saving does not bring it back for good"


class Tokenizer:
    """Saves nothing. These models have no tokenizer; their padding is 0."""

    pad_token_id = 0

    def save_pretrained(self, _folder):
        return ()


def test_a_frozen_engine_is_not_saved(everyone, tmp_path):
    worker = build_everyone(everyone, {})
    with pytest.raises(AssertionError, match="reference is not trained"):
        worker.save("reference", ModelConfig(path=str(everyone)).model_dump_json(), str(tmp_path))


def test_a_loss_is_that_of_one_role(everyone):
    """The critic's own loss says nothing about the policy's, which is cross-entropy until another is bound."""
    worker = Worker(torch.device("cpu"))
    for role, head in (("policy", "logprobs"), ("critic", "token_values")):
        build_one(worker, role, everyone, EngineConfig(), optimizer=OPTIMIZER, head=head)
    worker.use_loss("critic", "value", CriticConfig(value_loss={"clip": None}).model_dump_json(), {})
    samples = with_values(worker, supervised_samples())
    logprobs = torch.cat(score(worker, samples))
    assert train(worker, samples)["train/loss"].result() == pytest.approx(-float(logprobs.sum()) / 3, rel=1e-6)
    assert train(worker, samples, "critic")["train/loss"].result() == pytest.approx(0.5, rel=1e-5)


def test_every_role_scores_with_its_own_head(everyone):
    worker = build_everyone(everyone, {})
    samples = roll_out(worker)
    found = {role: trainer_logprobs(worker, samples, role) for role in ROLES}
    torch.testing.assert_close(found["policy"], found["reference"])
    for sample, values, scores in zip(samples, found["critic"], found["reward"], strict=True):
        assert not values[~sample.loss_mask].any()
        assert scores[-1] != 0
        assert not scores[:-1].any()
    assert float((torch.cat(found["critic"]) - torch.cat(found["policy"])).abs().max()) > 1e-3


def test_scores_are_at_the_temperature_of_their_engine(everyone):
    worker, reference = Worker(torch.device("cpu")), tiny_model("llama")
    samples = supervised_samples()
    for temperature in (1.0, 0.5):
        build_one(worker, f"at {temperature}", everyone, EngineConfig().frozen(), temperature=temperature)
        for sample, values in zip(samples, score(worker, samples, f"at {temperature}"), strict=True):
            with torch.no_grad():
                expected = reference_logprobs(reference, sample.token_ids, temperature=temperature)
            torch.testing.assert_close(values[sample.loss_mask], expected[sample.loss_mask], atol=1e-5, rtol=1e-5)


def score(worker, samples, role="policy", *, max_tokens=10):
    packed = pack(samples, num_shards=1, max_tokens=max_tokens)
    return unpack(packed, [worker.score(packed.shards[0], role, True)])


def supervised_samples():
    return [
        Sample(uid="a", token_ids=torch.tensor([4, 9, 30, 2]), loss_mask=torch.tensor([False, False, True, True])),
        Sample(uid="b", token_ids=torch.tensor([50, 9]), loss_mask=torch.tensor([False, True])),
    ]


def test_close_drops_every_engine_and_another_recipe_starts_afresh(everyone):
    worker = build_everyone(everyone, {"policy": "both"})
    worker.close()
    with pytest.raises(AssertionError):
        worker.generate([])
    for role in ROLES:
        with pytest.raises(KeyError):
            worker.score([], role, True)
    build_one(worker, "policy", everyone, EngineConfig(), optimizer=OPTIMIZER)
    samples = supervised_samples()
    logprobs = torch.cat(score(worker, samples))
    assert train(worker, samples)["train/loss"].result() == pytest.approx(-float(logprobs.sum()) / 3, rel=1e-6)


@pytest.mark.parametrize("offload", [False, True])
def test_a_student_learns_from_its_teacher_one_after_the_other_on_the_device(everyone, monkeypatch, offload):
    """The divergence from a teacher of the same weights is 0, and grows when the student learns something else."""
    worker, samples = Worker(torch.device("cpu")), supervised_samples()
    layout = EngineConfig(param_offload=offload)
    build_one(worker, "teacher", everyone, layout.frozen())
    build_one(worker, "student", everyone, layout, optimizer=OPTIMIZER)
    worker.check_teacher("student", "teacher")
    train(worker, samples, "student")
    worker.use_loss("student", "distillation", DistillationConfig().model_dump_json(), {})
    there = []
    for role in ("student", "teacher"):
        engine = engine_of(worker, role)
        for name in ("teacher_outputs", "forward_backward"):
            original = getattr(engine, name)

            def run(*args, original=original, role=role, **kwargs):
                there.append((role, [bytes_on_device(engine_of(worker, r))[0] > 0 for r in ("student", "teacher")]))
                return original(*args, **kwargs)

            monkeypatch.setattr(engine, name, run)
    packed = pack(samples, num_shards=1, max_tokens=10)
    divergences = [torch.cat(worker.divergence(packed.shards[0], "student", "teacher"))]
    losses = [worker.train(packed.shards[0], packed.denominators, "student", "teacher")["train/loss"].result()]
    divergences.append(torch.cat(worker.divergence(packed.shards[0], "student", "teacher")))
    assert losses[0] == pytest.approx(float(divergences[0].sum()) / packed.denominators.num_tokens, rel=1e-5)
    assert 0 < float(divergences[1].sum()) < float(divergences[0].sum())
    teaches, learns = ("teacher", [not offload, True]), ("student", [True, not offload])
    assert there == [teaches, teaches, learns, teaches]


def test_num_parameters_count_tied_weights_once(tmp_path):
    folder = tiny_folder("qwen3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    hidden, heads, kv, dim, mlp = (
        config[name]
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    )
    layer = 2 * hidden * heads * dim + 2 * hidden * kv * dim + 3 * hidden * mlp + 2 * hidden + 2 * dim
    expected = config["vocab_size"] * hidden + config["num_hidden_layers"] * layer + hidden
    worker = Worker(torch.device("cpu"))
    trained = build_one(worker, "policy", folder, EngineConfig(), optimizer=OPTIMIZER)
    frozen = build_one(worker, "reference", folder, EngineConfig().frozen())
    assert trained[:2] == (expected, expected)
    assert frozen[0] == expected
    assert trained[2] == frozen[2] > 0


def bytes_on_device(engine) -> tuple[int, int]:
    """Of the weights, and of the optimizer's states."""
    return tuple(
        sum(storage.nbytes() for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())
        for tensors in (
            [parameter.to_local() for parameter in engine._model.parameters()],
            list(engine._optimizer.state_tensors()) if engine._optimizer else [],
        )
    )


def test_a_state_is_saved_and_loaded_while_other_engines_have_the_device(everyone, tmp_path):
    """The critic's weights and moments are on the host when the command comes."""
    worker, other = (build_everyone(everyone, dict.fromkeys(ROLES, "both")) for _ in range(2))
    samples = with_values(worker, roll_out(worker))
    for _ in range(2):
        train(worker, samples, "critic")
    worker.sync_weights(1)
    worker.save("critic", ModelConfig(path=str(everyone)).model_dump_json(), str(tmp_path), str(tmp_path / "critic"))
    worker.sync_weights(2)  # the critic leaves the device again
    assert other.load_state("critic", str(tmp_path / "critic")) is None
    other.sync_weights(2)
    for one, two in zip(
        score(worker, samples, "critic", max_tokens=40), score(other, samples, "critic", max_tokens=40), strict=True
    ):
        assert torch.equal(one, two)
    again = [train(each, samples, "critic")["train/grad_norm"].result() for each in (worker, other)]
    assert again[0] == again[1]


def test_a_critic_goes_on_from_its_weights_without_states_while_other_engines_have_the_device(everyone, tmp_path):
    """Its value head comes from the checkpoint too."""
    worker, other = (build_everyone(everyone, dict.fromkeys(ROLES, "both")) for _ in range(2))
    samples = with_values(worker, roll_out(worker))
    for _ in range(2):
        train(worker, samples, "critic")
    worker.save("critic", ModelConfig(path=str(everyone)).model_dump_json(), str(tmp_path), str(tmp_path / "state"))
    (tmp_path / "state" / "rank_0.safetensors").unlink()
    other.sync_weights(1)
    other.load_weights_alone("critic", str(tmp_path), str(tmp_path / "state"))
    worker.sync_weights(2)
    other.sync_weights(2)
    for one, two in zip(
        score(worker, samples, "critic", max_tokens=40), score(other, samples, "critic", max_tokens=40), strict=True
    ):
        assert torch.equal(one, two)
    assert engine_of(other, "critic").state.numbers() == engine_of(worker, "critic").state.numbers()


def test_the_files_of_a_checkpoint_are_hashed_and_verified(tmp_path):
    (tmp_path / "a").write_text("text")
    worker = Worker(torch.device("cpu"))
    hashes = worker.hash_files(str(tmp_path))
    assert hashes == {"a": {"num_bytes": 4, "xxh3": xxhash.xxh3_64_hexdigest(b"text")}}
    write_manifest(tmp_path, [hashes], step=1)
    assert worker.verify_files(str(tmp_path)) is None
    (tmp_path / "a").write_text("test")
    assert f"{tmp_path / 'a'} is damaged" in worker.verify_files(str(tmp_path))
