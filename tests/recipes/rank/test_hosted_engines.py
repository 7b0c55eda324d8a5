"""How the engines of a rank share its device, and whose errors are whose."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_workers import (
    OPTIMIZER,
    ROLES,
    build_everyone,
    build_one,
    bytes_on_device,
    engine_of,
    roll_out,
    train,
    trainer_logprobs,
    with_values,
)
from tiny_models import tiny_folder

from shardwise.config import ConfigError, EngineConfig, ModelError
from shardwise.recipes.rank.worker import Worker

pytestmark = pytest.mark.usefixtures("alone")


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


def test_building_an_engine_makes_room_for_it(everyone, monkeypatch):
    """The weights of two models never need the device at once."""
    worker = Worker(torch.device("cpu"))
    layout = EngineConfig(param_offload=True)
    build_one(worker, "policy", everyone, layout, optimizer=OPTIMIZER)
    assert bytes_on_device(engine_of(worker))[0] > 0
    monkeypatch.setattr("shardwise.recipes.rank.hosted_engines.TrainEngine.build", lambda *_, **__: pytest.fail(
        "the policy is still there") if bytes_on_device(engine_of(worker))[0] else None)  # fmt: skip
    with pytest.raises(AttributeError):  # the fake builds nothing
        build_one(worker, "reference", everyone, layout.frozen())


AWAY = {"params": (0, 1), "optimizer": (1, 0), "both": (0, 0), "none": (1, 1)}
"""What is left on the device of (weights, optimizer states) by what is offloaded: 0 nothing, 1 all."""


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
    watched(worker.engines.rollout_engine, "rollout", "generate")
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
            whole_weights, full_states = whole[role]
            if role not in have_states:
                full_states = 0
            keeps_weights, keeps_states = AWAY[offload.get(role, "none")]
            if role == who:
                keeps_weights = 1
                keeps_states |= name in ("forward_backward", "optim_step")
            expected = whole_weights * keeps_weights, full_states * keeps_states
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
        worker.engines.rollout_engine = Elsewhere(worker.engines.rollout_engine, calls)
    monkeypatch.setattr("shardwise.recipes.rank.hosted_engines.release_cached_blocks", lambda: calls.append("released"))
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
