"""The training state of an engine: goes on bitwise on the same layout, is bitwise the same on any other."""

import json
import os
import pickle
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankError
from safetensors.torch import load_file
from sharded_lora import full, needs_integer_shards
from tiny_models import random_samples, tiny_folder

from shardwise.config import EngineConfig, ExportError, ModelError, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.data.synthetic import train_tokenizer
from shardwise.engine import TrainEngine
from shardwise.recipes.losses import sft_loss

LENGTHS = [9, 7, 12, 5, 4, 11]
BEFORE, AFTER = 3, 3
OVERFLOW = 1
"""The step whose loss is too large for float16, and for it alone."""


def build(folder, engine, optimizer, seed=3) -> TrainEngine:
    return TrainEngine.build(
        Path(folder),
        EngineConfig(**engine),
        device=torch.device("cpu"),
        optimizer=OptimizerConfig(**{"learning_rate": 3e-3, "weight_decay": 0.1} | optimizer),
        total_steps=BEFORE + AFTER,
        seed=seed,
    )


def steps(engine, numbers, ulysses_size=1):
    """The metrics of optimizer steps, each on samples of its own. Losses are sums over ranks."""
    num_shards = dist.get_world_size() // ulysses_size
    rows = []
    for number in numbers:

        def loss_fn(outputs, batch, denominators, number=number):
            loss, metrics = sft_loss(outputs, batch, denominators)
            return loss * (1e6 if number == OVERFLOW and engine._compute_dtype == torch.float16 else 1.0), metrics

        step = pack(random_samples(LENGTHS, seed=number), num_shards=num_shards, max_tokens=32)
        batches = step.shards[dist.get_rank() // ulysses_size]
        metrics = engine.forward_backward(batches, loss_fn, step.denominators)
        loss = torch.tensor([metrics.pop("train/loss").result()]) / ulysses_size
        dist.all_reduce(loss)
        metrics |= engine.optim_step()
        values = {name: value.result() for name, value in metrics.items() if "/busy/" not in name}  # seconds
        rows.append(values | {"loss": loss.item()})
    return rows


def state_of(engine):
    """Every tensor of the state, whole, and the numbers."""
    tensors = {name: full(tensor).clone() for name, tensor in engine._optimizer.named_tensors().items()}
    return tensors, engine._optimizer.numbers()


def uninterrupted(folder, state, engine, optimizer):
    """Trains, saves, trains on: the state that was saved, then the rest."""
    trained = build(folder, engine, optimizer)
    size = engine.get("ulysses_size", 1)
    before = steps(trained, range(BEFORE), size)
    trained.save_state(Path(state))
    saved = state_of(trained)
    return before, saved, steps(trained, range(BEFORE, BEFORE + AFTER), size), state_of(trained)


def resumed(folder, state, engine, optimizer):
    fresh = build(folder, engine, optimizer, seed=3)
    fresh.load_state(Path(state))
    loaded = state_of(fresh)
    return loaded, steps(fresh, range(BEFORE, BEFORE + AFTER), engine.get("ulysses_size", 1)), state_of(fresh)


def assert_same(found, expected):
    (tensors, numbers), (others, other_numbers) = found, expected
    assert numbers == other_numbers
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name


LORA = {"rank": 3, "alpha": 12.0, "target_modules": ["q_proj", "v_proj", "down_proj"], "dropout": 0.3}
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
    "kind", [pytest.param(kind, marks=pytest.mark.full if kind in ("foreach", "frozen") else ()) for kind in KINDS]
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
    if "lora" in engine:
        trained.export_adapter(Path(out) / "adapter", folder)
    else:
        trained.export_hf(Path(out) / "hf", train_tokenizer(["2+3=5"], vocab_size=261))
    trained.save_state(Path(out) / "state")
    dist.barrier()
    (Path(out) / "state" / f"rank_{dist.get_rank()}.safetensors").unlink(missing_ok=True)  # a replica has none
    for torch_optimizer in trained._optimizer.optimizers:
        torch_optimizer.state.clear()
    fresh = build(folder, engine, optimizer)
    fresh.load_without_states(Path(out), Path(out) / "state")
    rest = range(BEFORE, BEFORE + AFTER)
    return state_of(trained), state_of(fresh), steps(trained, rest), steps(fresh, rest)


FROZEN_IN_FLOAT32 = {
    "param_dtype": "bfloat16",
    "master_dtype": "bfloat16",
    "freeze_module_prefix": ["model.layers.0.mlp"],
    "module_precision": [{"module": "model.layers.0.mlp", "param_dtype": "float32"}],
}
"""In hf/ these weights are rounded to bfloat16, in the model's folder they are not."""
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
OF_LAYOUTS = {
    **dict.fromkeys(("float16", "replicas", "shared experts", "shared experts of replicas"), pytest.mark.full),
    "nf4": [pytest.mark.full, needs_integer_shards],
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=OF_LAYOUTS.get(kind, ())) for kind in FROM_WEIGHTS])
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
    first.save_state(Path(state))
    second = build(folder, {}, {})
    second.load_state(Path(state))
    return list(second._optimizer.named_tensors()), steps(first, [0, 1]) == steps(second, [0, 1])


def test_an_engine_that_was_saved_before_its_first_step_saves_the_optimizers_states_after_it(run_ranks, tmp_path):
    folder, state = str(tiny_folder("llama", tmp_path / "model")), str(tmp_path / "state")
    for saved, loaded in run_ranks(saved_twice, 2, folder, state):
        assert {name.partition("/")[0] for name in saved[0]} == {"master", "step", "exp_avg", "exp_avg_sq"}
        assert_same(loaded, saved)


def saved_twice(folder, state):
    first = build(folder, {}, {})
    first.save_state(Path(state))
    steps(first, [0])
    first.save_state(Path(state))
    second = build(folder, {}, {})
    second.load_state(Path(state))
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
    *(("2x2 to 4", "adamw_cpu"), ("1 to 2", "muon")),
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
        [(name, 4, "adamw") for name in EXPERTS_REPEATED],
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


def saved_after_a_step(folder, state, engine):
    trained = build(folder, engine, {})
    steps(trained, [0])
    trained.save_state(Path(state))


def saved_meanwhile(folder, state):
    """How much of this rank's file was there at the end of what was done meanwhile; then again, with an error."""
    trained = build(folder, {}, {})
    steps(trained, [0])
    trained.save_state(Path(state) / "before")
    name = f"rank_{dist.get_rank()}.safetensors"
    whole = (Path(state) / "before" / name).stat().st_size

    def wait():
        file, deadline = Path(state) / "after" / name, time.monotonic() + 30
        while not (file.is_file() and file.stat().st_size == whole):
            assert time.monotonic() < deadline, f"{file} is written afterwards"
            time.sleep(0.01)
        dist.barrier()

    def fail():
        raise ExportError("the model cannot be written")

    trained.save_state(Path(state) / "after", meanwhile=wait)
    with pytest.raises(ExportError, match="the model cannot be written"):
        trained.save_state(Path(state) / "failed", meanwhile=fail)
    trained.save_state(Path(state) / "failed")


def test_a_thread_writes_the_state_while_something_else_is_done(run_ranks, tmp_path):
    run_ranks(saved_meanwhile, 2, str(tiny_folder("llama", tmp_path / "model")), str(tmp_path))
    before, *others = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("before", "after", "failed")
    )
    assert others == [before, before]


def test_a_shard_that_replicas_share_is_written_once(run_ranks, tmp_path):
    folder = str(tiny_folder("llama", tmp_path / "model"))
    sizes = {}
    for name, engine in {"sharded": {}, "2x2": {"fsdp_size": 2}}.items():
        state = tmp_path / name
        run_ranks(saved_after_a_step, 4, folder, str(state), engine)
        tensors = [load_file(file) for file in state.glob("*.safetensors")]
        sizes[name] = sum(tensor.numel() for file in tensors for tensor in file.values())
        assert len(tensors) > 1, "replicas share the writing"
    assert len(set(sizes.values())) == 1
    index = json.loads((tmp_path / "sharded" / "index.json").read_text())["content"]["tensors"]
    assert sizes["sharded"] == sum(torch.Size(tensor["shape"]).numel() for tensor in index.values())


class Trap:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def test_trap_15_a_pickle_beside_the_files_is_never_read(run_ranks, tmp_path):
    folder, state = str(tiny_folder("llama", tmp_path / "model")), tmp_path / "state"
    _, saved, _, _ = run_ranks(uninterrupted, 1, folder, str(state), {}, {})[0]
    for name in (".metadata", "state.pt", "__0_0.distcp", "rng_state.pkl"):
        (state / name).write_bytes(pickle.dumps(Trap(str(tmp_path / "mark"))))
    ((loaded, _, _),) = run_ranks(resumed, 1, folder, str(state), {}, {})
    assert_same(loaded, saved)
    assert not (tmp_path / "mark").exists()
    assert pickle.loads((state / ".metadata").read_bytes()) is None, "the trap does not work"
    assert (tmp_path / "mark").exists()


@pytest.fixture(scope="module")
def kept(run_ranks, tmp_path_factory):
    """A model folder, and the state of two ranks that trained it."""
    root = tmp_path_factory.mktemp("kept")
    folder, state = str(tiny_folder("llama", root / "model")), str(root / "state")
    run_ranks(uninterrupted, 2, folder, state, {}, {})
    return Path(folder), Path(state)


def refused(folder, states, engines):
    """The errors of loading each state into an engine; none may have changed a weight."""
    errors = []
    for state, (engine, optimizer) in zip(states, engines, strict=True):
        fresh = build(folder, engine, optimizer)
        before = {name: full(tensor).clone() for name, tensor in fresh._optimizer.named_tensors().items()}
        with pytest.raises(ModelError) as error:
            fresh.load_state(Path(state))
        after = fresh._optimizer.named_tensors()
        assert all(torch.equal(full(after[name]), tensor) for name, tensor in before.items())
        errors.append(str(error.value))
    return errors


def cut(path, num_bytes):
    path.write_bytes(path.read_bytes()[:num_bytes])


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = {
    "empty": (lambda state: cut(state / "rank_1.safetensors", 0), "rank_1.safetensors is damaged: it has 0 bytes"),
    "cut": (lambda state: cut(state / "rank_0.safetensors", -1), "rank_0.safetensors is damaged: it has"),
    "missing": (lambda state: (state / "rank_1.safetensors").unlink(), "rank_1.safetensors is missing"),
    "index cut": (lambda state: cut(state / "index.json", 500), "index.json is damaged"),
    "index missing": (lambda state: (state / "index.json").unlink(), "index.json is missing"),
    "last bit": (lambda state: flip(state / "rank_1.safetensors", -1), "rank_1.safetensors is damaged: "),
    "header": (lambda state: flip(state / "rank_0.safetensors", 30), "rank_0.safetensors is damaged: its header"),
    "index number": (
        lambda state: (state / "index.json").write_text(
            (state / "index.json").read_text().replace('"num_steps": 3', '"num_steps": 2')
        ),
        "index.json is damaged: its content does not have the xxh3 hash",
    ),
}


def test_a_damaged_file_is_named_on_every_rank_before_anything_is_loaded(run_ranks, kept, tmp_path):
    copies = [Path(shutil.copytree(kept[1], tmp_path / name)) for name in DAMAGES]
    for copied, (damage, _) in zip(copies, DAMAGES.values(), strict=True):
        damage(copied)
    first, second = run_ranks(refused, 2, str(kept[0]), list(map(str, copies)), [({}, {})] * len(copies))
    assert first == second
    for error, copied, (_, expected) in zip(first, copies, DAMAGES.values(), strict=True):
        assert f"{copied}/{expected}" in error
    bit = first[list(DAMAGES).index("last bit")]
    assert any(f"{key}/" in bit for key in ("master", "exp_avg", "exp_avg_sq", "step")), "the tensor is named"


OTHERS = {
    "another optimizer": ({}, {"optimizer": "muon"}, "missing: momentum_buffer/model.layers.0"),
    "fewer parameters": (
        {"freeze_module_prefix": ["model.layers.0"]},
        {},
        "9 not part of the model: master/model.layers.0.input_layernorm.weight",
    ),
    "another dtype": (
        {"param_dtype": "bfloat16", "master_dtype": "bfloat16"},
        {},
        "of the wrong shape or dtype: master/model.embed_tokens.weight is float32 [101, 30], expected bfloat16",
    ),
    "a loss scale": ({"param_dtype": "float16"}, {}, "computes in another dtype, this one computes in float16"),
    "adapters": ({"lora": LORA}, {}, "missing: master/"),
}


def test_the_state_of_another_engine_is_refused_by_name(run_ranks, kept):
    folder, state = kept
    engines = [(engine, optimizer) for engine, optimizer, _ in OTHERS.values()]
    first, second = run_ranks(refused, 2, str(folder), [str(state)] * len(engines), engines)
    assert first == second
    for error, (_, _, expected) in zip(first, OTHERS.values(), strict=True):
        assert expected in error


def test_the_state_of_a_model_of_another_size_is_refused_by_name(run_ranks, kept, tmp_path):
    wider = tiny_folder("llama", tmp_path / "wider", intermediate_size=52)
    ((text,),) = run_ranks(refused, 1, str(wider), [str(kept[1])], [({}, {})])
    assert "6 of the wrong shape or dtype: master/model.layers.0.mlp.gate_proj.weight is float32 [50, 30]" in text
    assert "expected float32 [52, 30]" in text


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(run_ranks, kept, tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(RankError) as error:
        run_ranks(uninterrupted, 2, str(kept[0]), str(tmp_path / "taken"), {}, {})
    assert str(error.value).count("ExportError: ") >= 2
    assert "taken cannot be written" in str(error.value)
