"""The training state of an engine: goes on bitwise on the same layout, is bitwise the same on any other."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from resumed_engines import AFTER, BEFORE, LORA, assert_same, build, resumed, state_of, steps, uninterrupted
from sharded_lora import needs_integer_shards
from tiny_models import tiny_folder

from shardwise.data.synthetic import train_tokenizer

KINDS = {
    "adamw": ({}, {"lr_schedule": "cosine", "warmup_steps": 2}),
    "foreach": ({}, {"adamw_implementation": "foreach"}),
    "bf16 masters": ({"param_dtype": "bfloat16", "master_dtype": "bfloat16"}, {}),
    "float16": ({"param_dtype": "float16"}, {}),
    "muon": ({}, {"optimizer": "muon"}),
    "adamw_cpu": ({}, {"optimizer": "adamw_cpu"}),
    "lora": ({"lora": LORA}, {}),
    "frozen": ({"freeze_module_prefix": ["model.embed_tokens", "model.layers.0.mlp"]}, {}),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.full if kind in ("foreach", "frozen", "muon") else ()) for kind in KINDS],
)
def test_training_goes_on_bitwise(run_ranks, tmp_path, kind):
    engine, optimizer = KINDS[kind]
    folder, state = str(tiny_folder("llama", tmp_path / "model")), str(tmp_path / "state")
    first = run_ranks(uninterrupted, 2, folder, state, engine, optimizer)
    second = run_ranks(resumed, 2, folder, state, engine, optimizer)
    for (before, saved, rest, end), (loaded, again, same_end) in zip(first, second, strict=True):
        assert_same(loaded, saved)
        assert again == rest
        assert_same(same_end, end)
        numbers = saved[1]
        assert numbers["num_steps"] == BEFORE
        skipped = sum(row["train/nonfinite_fraction"] for row in before)
        assert skipped == (kind == "float16")
        if kind == "float16":
            assert numbers["loss_scaler"] == {"scale": 2.0**15, "num_finite_in_a_row": 1}
        if kind == "bf16 masters":
            assert numbers["num_updates"] == BEFORE


def without_states(folder, out, engine, optimizer):
    """Trains, saves, loses the optimizer's states, trains on; and an engine that begins with what was saved."""
    trained = build(folder, engine, optimizer)
    steps(trained, range(BEFORE))
    weights = Path(out) / "weights"
    if "lora" in engine:
        trained.export_adapter(weights, folder)
    else:
        trained.export_hf(weights, train_tokenizer(["2+3=5"], vocab_size=261))
    trained.state.save(Path(out) / "state")
    dist.barrier()
    (Path(out) / "state" / f"rank_{dist.get_rank()}.safetensors").unlink(missing_ok=True)  # a replica has none
    for torch_optimizer in trained._optimizer.optimizers:
        torch_optimizer.state.clear()
    fresh = build(folder, engine, optimizer, with_trained=False)
    fresh.state.load_weights_alone(weights, Path(out) / "state")
    rest = range(BEFORE, BEFORE + AFTER)
    return state_of(trained), state_of(fresh), steps(trained, rest), steps(fresh, rest)


FROZEN_IN_FLOAT32 = {
    "param_dtype": "bfloat16",
    "master_dtype": "bfloat16",
    "freeze_module_prefix": ["model.layers.0.mlp"],
    "module_precision": [{"module": "model.layers.0.mlp", "param_dtype": "float32"}],
}
"""In the export these weights are rounded to bfloat16, in the model's folder they are not."""
FROM_WEIGHTS = {
    **{kind: (2, "llama", {}, *KINDS[kind]) for kind in ("adamw", "bf16 masters", "muon", "lora", "frozen")},
    "frozen in float32": (2, "llama", {}, FROZEN_IN_FLOAT32, {}),
    "float16": (2, "llama", {}, *KINDS["float16"]),
    "replicas": (4, "llama", {}, {"fsdp_size": 2}, {}),
    "shared experts": (2, "qwen3_moe", {"num_experts": 4}, {"ep_size": 2}, {}),
    "shared experts of replicas": (4, "qwen3_moe", {"num_experts": 4}, {"ep_size": 2, "fsdp_size": 2}, {}),
    "nf4": (2, "llama", {}, {"lora": LORA | {"quantize_base": "nf4"}}, {}),
    "lora on conv1d": (2, "gpt2", {}, {"lora": {"rank": 3, "use_dora": True}}, {}),
}
"""Ranks, model, engine and optimizer."""
MARKS = {
    **dict.fromkeys(
        ("bf16 masters", "float16", "frozen", "replicas", "shared experts", "shared experts of replicas"),
        pytest.mark.full,
    ),
    "nf4": [pytest.mark.full, needs_integer_shards],
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS.get(kind, ())) for kind in FROM_WEIGHTS])
def test_training_goes_on_from_weights_alone_as_if_the_optimizer_had_forgotten_its_states(run_ranks, tmp_path, kind):
    """With the learning rate of the step that comes, and the loss scale. Rounded are float32 masters to float16: the
    step that comes computes with that anyway."""
    num_ranks, family, size, engine, optimizer = FROM_WEIGHTS[kind]
    folder, out = str(tiny_folder(family, tmp_path / "model", **size)), tmp_path / "out"
    engine = {"param_dtype": "float32"} | engine
    for trained, fresh, rest, again in run_ranks(without_states, num_ranks, folder, str(out), engine, optimizer):
        rounded = {
            name: tensor.to(getattr(torch, engine["param_dtype"])).to(tensor.dtype)
            for name, tensor in trained[0].items()
        }
        assert_same(fresh, (rounded, trained[1]))
        assert {name.partition("/")[0] for name in fresh[0]} == {"master"}
        assert fresh[1]["num_steps"] == BEFORE
        if kind == "float16":
            assert fresh[1]["loss_scaler"] == {"scale": 2.0**15, "num_finite_in_a_row": 1}
            assert again[0]["loss"] == rest[0]["loss"]
        else:
            assert again == rest


def test_a_state_that_was_saved_before_the_first_step_is_loaded_too(run_ranks, tmp_path):
    folder, state = str(tiny_folder("llama", tmp_path / "model")), str(tmp_path / "state")
    ((names, equal),) = run_ranks(saved_at_once, 1, folder, state)
    assert {name.partition("/")[0] for name in names} == {"master"}
    assert equal


def saved_at_once(folder, state):
    first = build(folder, {}, {})
    first.state.save(Path(state))
    second = build(folder, {}, {})
    second.state.load(Path(state))
    return list(second._optimizer.named_tensors()), steps(first, [0, 1]) == steps(second, [0, 1])


def test_an_engine_that_was_saved_before_its_first_step_saves_the_optimizers_states_after_it(run_ranks, tmp_path):
    folder, state = str(tiny_folder("llama", tmp_path / "model")), str(tmp_path / "state")
    for saved, loaded in run_ranks(saved_twice, 2, folder, state):
        assert {name.partition("/")[0] for name in saved[0]} == {"master", "step", "exp_avg", "exp_avg_sq"}
        assert_same(loaded, saved)


def saved_twice(folder, state):
    first = build(folder, {}, {})
    first.state.save(Path(state))
    steps(first, [0])
    first.state.save(Path(state))
    second = build(folder, {}, {})
    second.state.load(Path(state))
    return state_of(first), state_of(second)


LAYOUTS = {
    "1 to 2": ((1, {}), (2, {})),
    "2 to 4": ((2, {}), (4, {})),
    "4 to 1": ((4, {}), (1, {})),
    "4 to 3": ((4, {}), (3, {})),
    "4 to 2x2": ((4, {}), (4, {"fsdp_size": 2})),
    "2x2 to 4": ((4, {"fsdp_size": 2}), (4, {})),
    "replicas to 2": ((2, {"fsdp_size": 1}), (2, {})),
    "2 to ulysses": ((2, {}), (2, {"ulysses_size": 2})),
    "ulysses to 2": ((2, {"ulysses_size": 2}), (2, {})),
    "2 to host": ((2, {}), (2, {"offload_policy": True})),
}


EXPERTS = {
    "2 to shared": ((2, {}), (2, {"ep_size": 2})),
    "shared to 2": ((2, {"ep_size": 2}), (2, {})),
    "shared by 2 to shared by 4": ((4, {"ep_size": 2}), (4, {"ep_size": 4})),
    "shared to replicas": ((4, {"ep_size": 2}), (4, {"ep_size": 2, "fsdp_size": 2})),
    "shared to 1": ((4, {"ep_size": 4, "fsdp_size": 4}), (1, {})),
}
"""Of a mixture of 4 experts, which some ranks share."""
OTHER_OPTIMIZERS = [(name, optimizer) for name in ("1 to 2", "2x2 to 4") for optimizer in ("muon", "adamw_cpu")]
REPEATED = [
    *((name, "adamw") for name in ("2 to 4", "4 to 1", "ulysses to 2", "4 to 2x2", "2x2 to 4", "replicas to 2")),
    *(("1 to 2", "adamw"), ("2 to host", "adamw"), ("2x2 to 4", "adamw_cpu"), ("2x2 to 4", "muon")),
]
EXPERTS_REPEATED = ["shared by 2 to shared by 4", "shared to replicas", "shared to 1", "shared to 2"]
"""What other cells have the parts of: only in `make test-full`."""


def cells(all_of_them, repeated):
    return [pytest.param(*cell, marks=pytest.mark.full if cell in repeated else ()) for cell in all_of_them]


@pytest.mark.parametrize(
    ("name", "optimizer"), cells([*((name, "adamw") for name in LAYOUTS), *OTHER_OPTIMIZERS], REPEATED)
)
def test_f24_trap_15_another_layout_has_the_same_state_and_goes_on_within_1e_5(run_ranks, tmp_path, name, optimizer):
    """llama's dimensions are odd: its key and value projections have fewer rows than there are ranks."""
    (size, engine), (other_size, other_engine) = LAYOUTS[name]
    options = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32} if "ulysses" in name else {}
    folder, state = str(tiny_folder("llama", tmp_path / "model", **options)), str(tmp_path / "state")
    _, saved, rest, _ = run_ranks(uninterrupted, size, folder, state, engine, {"optimizer": optimizer})[0]
    for loaded, again, _ in run_ranks(resumed, other_size, folder, state, other_engine, {"optimizer": optimizer}):
        assert_same(loaded, saved)
        for row, expected in zip(again, rest, strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            assert row["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "num_experts", "optimizer"),
    cells(
        [*((name, 4, "adamw") for name in EXPERTS), ("shared to replicas", 6, "adamw_cpu"), ("shared to 2", 4, "muon")],
        [*((name, 4, "adamw") for name in EXPERTS_REPEATED), ("shared to replicas", 6, "adamw_cpu")],
    ),
)
def test_f24_experts_that_other_ranks_share_have_the_same_state_and_go_on_within_1e_5(
    run_ranks, tmp_path, name, num_experts, optimizer
):
    (size, engine), (other_size, other_engine) = EXPERTS[name]
    folder = str(tiny_folder("qwen3_moe", tmp_path / "model", num_experts=num_experts))
    state = str(tmp_path / "state")
    _, saved, rest, _ = run_ranks(uninterrupted, size, folder, state, engine, {"optimizer": optimizer})[0]
    for loaded, again, _ in run_ranks(resumed, other_size, folder, state, other_engine, {"optimizer": optimizer}):
        assert_same(loaded, saved)
        for row, expected in zip(again, rest, strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            assert row["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)
