import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankError
from safetensors.torch import load_file, save_file
from sharded_lora import (
    SAVED,
    VARIANTS,
    build,
    logits,
    loss_and_gradients,
    peft_model,
    random_adapter,
    wholes,
)
from tiny_models import tiny_folder

from shardwise.config import EngineConfig, LoraConfig, ModelError, OptimizerConfig
from shardwise.engine import TrainEngine
from shardwise.engine.files.adapters import adapter_weights, export_adapter, load_adapter
from shardwise.engine.lora import adapter_names, base_names, trained_copies
from shardwise.engine.weights import stream_weights

CASES = [
    ("qwen3", "lora", True),
    ("llama", "lora", True),
    ("llama", "rslora", False),
    ("llama", "dora", True),
    ("qwen3", "dora", False),
    ("qwen3_moe", "experts", True),
    ("qwen3_moe", "only_experts", False),
    ("gpt2", "conv1d", True),
    ("gpt2", "dora", False),
]
"""Family, variant, with modules to save. Dimensions of llama and gpt2 divide by neither 2 nor 4 ranks everywhere."""
FAMILIES = sorted({family for family, _, _ in CASES})
COVERING = {
    ("qwen3", "lora", True, (4, 2)),
    ("llama", "rslora", False, (2, None)),
    ("llama", "dora", True, (4, None)),
    ("qwen3_moe", "experts", True, (4, None)),
    ("qwen3_moe", "only_experts", False, (2, None)),
    ("gpt2", "conv1d", True, (1, None)),
    ("gpt2", "dora", False, (2, None)),
}
"""Every variant once, with its ranks and fsdp_size. All in `make test-full`."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: str(tiny_folder(family, tmp_path_factory.mktemp(family))) for family in FAMILIES}


def lora_of(family, variant, *, saves):
    return VARIANTS[variant].model_copy(update={"modules_to_save": SAVED[family] if saves else []})


def trained_run(folder, lora, adapter_folder, exported, fsdp_size, checkpointed):
    """Loss, gradients, then two SGD steps; what the engine then exports, merges and computes."""
    model = build(folder, lora, fsdp_size=fsdp_size, checkpointed=checkpointed)
    load_adapter(model, adapter_folder)
    losses, gradients = [], []
    in_file = adapter_names(model)
    for _ in range(2):
        loss, by_name = loss_and_gradients(model, dist.get_world_size(), dist.get_rank())
        by_name = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in wholes(by_name).items()}
        gradients.append({in_file[name]: gradient for name, gradient in by_name.items()})
        losses.append(loss)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.02 * parameter.grad
                    parameter.grad = None
    export_adapter(model, exported, "the/base")
    weights = dict(stream_weights(model, torch.float32)), dict(adapter_weights(model, torch.float32))
    return losses, gradients, weights, logits(model), list(stream_weights(model, torch.bfloat16))


@pytest.mark.parametrize(
    ("family", "variant", "saves", "world_size", "fsdp_size"),
    [
        pytest.param(*case, *sizes, marks=() if (*case, sizes) in COVERING else pytest.mark.full)
        for case in CASES
        for sizes in [(1, None), (2, None), (4, None), (4, 2)]
    ],
)
def test_training_export_and_merge_equal_those_of_a_plain_peft_model(
    run_ranks, folders, tmp_path, family, variant, saves, world_size, fsdp_size
):
    """Also: the exported folder loads into PeftModel.from_pretrained and gives the same logits."""
    lora = lora_of(family, variant, saves=saves)
    start = random_adapter(folders[family], lora, tmp_path / "start")
    checkpointed = world_size == 2
    runs = run_ranks(trained_run, world_size, folders[family], lora, start, tmp_path / "end", fsdp_size, checkpointed)
    plain = peft_model(folders[family], start)
    for step in range(2):
        loss, gradients = loss_and_gradients(plain)
        assert sum(run[0][step] for run in runs) == pytest.approx(loss, abs=1e-5)
        expected = {peft_file_name(name): gradient for name, gradient in gradients.items()}
        for run in runs:
            assert run[1][step].keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(run[1][step][name], gradient, rtol=0, atol=1e-5, msg=name)
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    parameter -= 0.02 * parameter.grad
                    parameter.grad = None
    exported = peft_model(folders[family], tmp_path / "end")
    stored = load_file(tmp_path / "end" / "adapter_model.safetensors")
    for _, _, (_, adapter), sharded_logits, _ in runs:
        assert adapter.keys() == stored.keys()
        assert all(torch.equal(adapter[name], stored[name]) for name in stored)
        for ours, theirs, trained in zip(sharded_logits, logits(exported), logits(plain), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
            torch.testing.assert_close(ours, trained, rtol=0, atol=1e-4)
    merged = exported.merge_and_unload()
    tied = set(merged.get_expanded_tied_weights_keys())
    expected = {name: tensor for name, tensor in merged.state_dict().items() if name not in tied}
    for run in runs:
        weights = run[2][0]
        assert list(weights) == list(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5, msg=name)
        assert all(torch.equal(tensor, weights[name].bfloat16()) for name, tensor in run[4])


def peft_file_name(name):
    name = name.replace(".default.", ".").replace(".modules_to_save.", ".")
    return name.removesuffix(".weight") if "lora_magnitude_vector" in name else name


def initial(folder, lora, seed, *, fsdp_size=None, checkpointed=False):
    model = build(folder, lora, seed=seed, fsdp_size=fsdp_size, checkpointed=checkpointed)
    return dict(adapter_weights(model, torch.float32)), dict(stream_weights(model, torch.float32)), logits(model)


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("llama", "dora"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("llama", "lora"), ("gpt2", "dora"))),
    ],
)
def test_initial_adapters_are_the_same_bits_on_every_layout_and_change_nothing(run_ranks, folders, family, variant):
    lora = lora_of(family, variant, saves=True)
    [(adapter, merged, first_logits)] = run_ranks(initial, 1, folders[family], lora, 5)
    for world_size, options in ((2, {"checkpointed": True}), (4, {}), (4, {"fsdp_size": 2})):
        for other, _, _ in run_ranks(partial(initial, **options), world_size, folders[family], lora, 5):
            assert other.keys() == adapter.keys()
            assert all(torch.equal(other[name], tensor) for name, tensor in adapter.items())
    [(other, _, _)] = run_ranks(initial, 1, folders[family], lora, 6)
    stored = load_file(f"{folders[family]}/model.safetensors")
    for name, tensor in adapter.items():
        if "lora_A" in name:
            bound = tensor.shape[1] ** -0.5  # kaiming uniform with a = sqrt(5)
            assert 0.9 * bound < tensor.abs().max() <= bound, name
            assert not torch.equal(other[name], tensor)
        elif "lora_B" in name:
            assert not tensor.any()
    starts = [tuple(tensor[0, :2].tolist()) for name, tensor in adapter.items() if "lora_A" in name]
    assert len(set(starts)) == len(starts)
    torch.testing.assert_close(merged, stored, rtol=0, atol=1e-6)
    plain = peft_free_logits(folders[family])
    for ours, theirs in zip(first_logits, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def copies_of_an_engine(folder, saved, head, keys):
    lora = LoraConfig(rank=2, target_modules=["q_proj"], modules_to_save=saved)
    engine = TrainEngine.build(
        Path(folder),
        EngineConfig(param_dtype="bfloat16", lora=lora, **keys),
        device=torch.device("cpu"),
        optimizer=OptimizerConfig(),
        head=head,
    )
    model = engine._model.hf_model
    state, names = model.state_dict(), base_names(model)
    pairs = trained_copies(model).items()
    found = wholes({name: state[name] for pair in pairs for name in pair})
    return {names[base]: (found[base], found[copy]) for base, copy in pairs}


@pytest.mark.parametrize(
    ("family", "saved", "head"),
    [
        ("llama", ["lm_head", "model.embed_tokens"], "logprobs"),
        ("llama", ["score"], "token_values"),
        ("qwen3_moe", ["layers.1.mlp"], "logprobs"),
    ],
)
def test_copies_in_modules_to_save_begin_as_the_file_has_them_whatever_the_base_is_rounded_to(
    run_ranks, folders, family, saved, head
):
    stored = load_file(f"{folders[family]}/model.safetensors")
    keys = {"experts_implementation": "eager"} if family == "qwen3_moe" else {}
    for copies in run_ranks(copies_of_an_engine, 2, folders[family], saved, head, keys):
        assert copies
        for name, (base, copy) in copies.items():
            assert (base.dtype, copy.dtype) == (torch.bfloat16, torch.float32)
            assert torch.equal(base, copy.bfloat16()), name
            assert not torch.equal(base.float(), copy) or "bias" in name, name
            assert torch.equal(copy, stored[name]) if name in stored else copy.isfinite().all(), name


def peft_free_logits(folder):
    from transformers import AutoModelForCausalLM

    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager"))


def export_twice(folder, lora, adapter_folder, first, second):
    model = build(folder, lora)
    load_adapter(model, adapter_folder)
    export_adapter(model, first, "the/base")
    again = build(folder, lora, seed=1)
    load_adapter(again, first)
    export_adapter(again, second, "the/base")


def test_exported_folder_is_read_back_bit_for_bit(run_ranks, folders, tmp_path):
    lora = lora_of("llama", "dora", saves=True)
    start = random_adapter(folders["llama"], lora, tmp_path / "start")
    run_ranks(export_twice, 4, folders["llama"], lora, start, tmp_path / "a", tmp_path / "b")
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors", "generation_config.json"]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    original, exported = (load_file(tmp_path / at / files[1]) for at in ("start", "a"))
    assert original.keys() == exported.keys()
    assert all(torch.equal(original[name], exported[name]) for name in original)
    config = json.loads((tmp_path / "a" / files[0]).read_text())
    assert config["base_model_name_or_path"] == "the/base"
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert not list(tmp_path.glob(".*"))


def loaded_logits(folder, lora, adapter_folder):
    model = build(folder, lora)
    load_adapter(model, adapter_folder)
    return logits(model)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("said", [True, False])
def test_which_way_round_a_weight_is_says_the_layer_and_not_the_adapters_file(run_ranks, folders, tmp_path, said):
    """As in peft, which corrects `fan_in_fan_out` for the layer it finds."""
    start = random_adapter(folders["gpt2"], VARIANTS["conv1d"], tmp_path / "start")
    change_config(start, fan_in_fan_out=said)
    expected = logits(peft_model(folders["gpt2"], start))
    [found] = run_ranks(loaded_logits, 1, folders["gpt2"], VARIANTS["conv1d"], start)
    for ours, theirs, plain in zip(found, expected, peft_free_logits(folders["gpt2"]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        assert (theirs - plain).abs().max() > 0.01


def load_into(folder, lora, adapter_folder):
    load_adapter(build(folder, lora), adapter_folder)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"rank": 4}, "the adapter has r=3 (here 4); give engine.lora the adapter's rank (r in the file), or start"),
        ({"alpha": 6}, "the adapter has lora_alpha=12.0 (here 6"),
        ({"use_dora": True}, "use_dora=False (here True)"),
        ({"target_modules": ["q_proj"]}, "8 not part of the model: base_model.model.model.layers.0.mlp.down_proj.lora"),
        ({"target_modules": "all-linear"}, "16 missing: base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight,"),
        ({"modules_to_save": ["lm_head"]}, "1 missing: base_model.model.lm_head.weight"),
    ],
)
def test_adapter_of_another_form_is_refused_with_both_values(run_ranks, folders, tmp_path, update, message):
    lora = VARIANTS["lora"]
    start = random_adapter(folders["llama"], lora, tmp_path / "start")
    with pytest.raises(RankError) as error:
        run_ranks(load_into, 1, folders["llama"], lora.model_copy(update=update), start)
    assert f"ModelError: {start}: " in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("missing", "update", "message"),
    [
        ("use_rslora", {"use_rslora": True}, "use_rslora=False (here True); give engine.lora the adapter's use_rslora"),
        ("lora_alpha", {"alpha": 12}, "lora_alpha=8 (here 12"),
    ],
)
def test_what_an_adapter_does_not_say_is_the_default_of_peft(run_ranks, folders, tmp_path, missing, update, message):
    """Those of early releases do not say whether they are rank-stabilized."""
    lora = VARIANTS["lora"].model_copy(update={"alpha": 12})
    start = random_adapter(folders["llama"], lora, tmp_path / "start")
    file = start / "adapter_config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != missing}))
    with pytest.raises(RankError) as error:
        run_ranks(load_into, 1, folders["llama"], lora.model_copy(update=update), start)
    assert message in str(error.value)


@pytest.mark.parametrize("initial", [False, "gaussian", "orthogonal"])
def test_how_an_adapter_was_drawn_does_not_matter(run_ranks, folders, tmp_path, initial):
    lora = VARIANTS["lora"]
    start = random_adapter(folders["llama"], lora, tmp_path / "start")
    expected = logits(peft_model(folders["llama"], start))
    change_config(start, init_lora_weights=initial)
    [found] = run_ranks(loaded_logits, 1, folders["llama"], lora, start)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value"),
    [("init_lora_weights", "pissa"), ("init_lora_weights", ["a"]), ("bias", "all"), ("rank_pattern", {"q": 2})],
)
def test_what_engine_lora_has_no_key_for_is_refused_with_what_to_do(run_ranks, folders, tmp_path, key, value):
    lora = VARIANTS["lora"]
    start = random_adapter(folders["llama"], lora, tmp_path / "start")
    change_config(start, **{key: value})
    with pytest.raises(RankError) as error:
        run_ranks(load_into, 1, folders["llama"], lora, start)
    assert f"the adapter has {key}={value!r} (here " in str(error.value)
    assert f"; engine.lora knows no {key}, so merge the adapter into its base" in str(error.value)


def change_config(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_adapter_of_another_shape_or_unreadable_is_refused(run_ranks, folders, tmp_path):
    lora = LoraConfig(rank=3, alpha=12, target_modules=["q_proj"])
    start = random_adapter(folders["llama"], lora, tmp_path / "start")
    file = start / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, file)
    with pytest.raises(RankError) as error:
        run_ranks(load_into, 1, folders["llama"], lora, start)
    assert f"1 of the wrong shape or dtype: {name} is [3, 29], expected [3, 30]" in str(error.value)
    (start / "adapter_config.json").write_text("[]")
    with pytest.raises(RankError, match=r"ModelError: .*adapter_config.json is not a JSON object"):
        run_ranks(load_into, 1, folders["llama"], lora, start)
    file.write_bytes(b"short")
    with pytest.raises(RankError, match=r"ModelError: .* cannot be read as a LoRA adapter"):
        run_ranks(load_into, 1, folders["llama"], lora, start)
    with pytest.raises(RankError, match=r"ModelError: .* cannot be read as a LoRA adapter.*No such file"):
        run_ranks(load_into, 1, folders["llama"], lora, tmp_path / "absent")


def refusals_and_what_was_loaded(folder, lora, adapter_folder):
    model = build(folder, lora)
    with pytest.raises(ModelError) as error:
        load_adapter(model, adapter_folder)
    dist.barrier()  # every rank is here, so none waits in a collective for another
    load_adapter(model, adapter_folder, require_finite=False)
    return str(error.value), dict(adapter_weights(model, torch.float32))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_adapter_that_is_not_finite_is_refused_by_every_rank_and_read_where_that_is_asked_for(
    run_ranks, folders, tmp_path, value
):
    lora = LoraConfig(rank=4, target_modules=["q_proj"])
    start = random_adapter(folders["llama"], lora, tmp_path / "start")
    file = start / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    tensors[name][3, 5] = value  # a row of rank 1
    save_file(tensors, file)
    for message, loaded in run_ranks(refusals_and_what_was_loaded, 2, folders["llama"], lora, start):
        assert message == (
            f"rank 1: {file}: {name} holds NaN or infinities, so nothing could be computed with it; copy the file "
            "again, or take an earlier checkpoint"
        )
        torch.testing.assert_close(loaded[name], tensors[name], rtol=0, atol=0, equal_nan=True)


def test_adapter_of_integers_is_refused(run_ranks, folders, tmp_path):
    lora = LoraConfig(rank=4, target_modules=["q_proj"])
    start = random_adapter(folders["llama"], lora, tmp_path / "start")
    file = start / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, file)
    with pytest.raises(RankError) as error:
        run_ranks(load_into, 1, folders["llama"], lora, start)
    assert (
        f"ModelError: {file}: {name} is int8 [4, 30], and adapters are stored as float64, float32, bfloat16, float16; "
        "save it again with peft's save_pretrained"
    ) in str(error.value)
