import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from family_table import FAMILIES, random_model, save_model
from tiny_models import random_samples, reference_logprobs, tiny_folder, tiny_vision_model
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.config import ConfigError, EngineConfig, FrozenEngineConfig, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.engine.freeze import freeze
from shardwise.engine.model import build_on_meta
from shardwise.engine.model_classes import language_model_of
from shardwise.engine.precision import Precision, emulated_dtype
from shardwise.families import vision_paths
from shardwise.recipes.losses import sft_loss
from shardwise.types import Sample

CPU = torch.device("cpu")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
GATE = "model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder("llama", tmp_path_factory.mktemp("llama"))


def kept_dtypes(folder, config, frozen_prefixes=()):
    """Of each parameter the dtype between steps, by its name."""
    model = build_on_meta(folder)
    if isinstance(config, FrozenEngineConfig):
        model.requires_grad_(False)
    else:
        freeze(model, frozen_prefixes)
    precision = Precision(model, config)
    precision.cast_parameters(model)
    return precision, {name: parameter.dtype for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("options", "trained", "frozen"),
    [
        ({}, F32, F32),
        ({"param_dtype": "bfloat16"}, F32, BF16),
        ({"param_dtype": "bfloat16", "master_dtype": "bfloat16"}, BF16, BF16),
        ({"param_dtype": "float16"}, F32, F16),
    ],
)
def test_trained_parameters_are_masters_and_frozen_ones_are_kept_as_they_compute(folder, options, trained, frozen):
    """Trap 3."""
    _, dtypes = kept_dtypes(folder, EngineConfig(**options), ["model.layers.0.", "model.embed_tokens"])
    for name, dtype in dtypes.items():
        is_frozen = name.startswith(("model.layers.0.", "model.embed_tokens"))
        assert dtype == (frozen if is_frozen else trained), name
    assert set(kept_dtypes(folder, FrozenEngineConfig(param_dtype="bfloat16"))[1].values()) == {BF16}


def test_frozen_parameters_of_an_override_are_kept_in_its_dtype_and_trained_ones_stay_masters(folder):
    overrides = [{"module": GATE, "param_dtype": "float32"}]
    _, dtypes = kept_dtypes(folder, FrozenEngineConfig(param_dtype="bfloat16", module_precision=overrides))
    assert {name for name, dtype in dtypes.items() if dtype == F32} == {f"{GATE}.weight"}
    overrides = [{"module": GATE, "param_dtype": "bfloat16"}]
    _, dtypes = kept_dtypes(folder, EngineConfig(module_precision=overrides))
    assert set(dtypes.values()) == {F32}


@pytest.mark.parametrize("inner_first", [True, False])
def test_innermost_override_decides_how_a_frozen_parameter_is_kept(folder, inner_first):
    """A gate that computes in float32 inside a layer that computes in bfloat16 must not be rounded between steps."""
    overrides = [
        {"module": GATE, "param_dtype": "float32"},
        {"module": "model.layers.0", "param_dtype": "bfloat16"},
    ]
    config = FrozenEngineConfig(param_dtype="float16", module_precision=overrides if inner_first else overrides[::-1])
    _, dtypes = kept_dtypes(folder, config)
    for name, dtype in dtypes.items():
        expected = F32 if name.startswith(GATE) else BF16 if name.startswith("model.layers.0.") else F16
        assert dtype == expected, name


def test_policy_of_a_unit_is_the_engines_or_its_overrides(folder):
    overrides = [
        {"module": "model.layers.*.mlp.gate_proj", "param_dtype": "float32"},
        {"module": "model.norm", "cast_forward_inputs": False},
    ]
    config = EngineConfig(param_dtype="bfloat16", reduce_dtype="bfloat16", module_precision=overrides)
    precision, _ = kept_dtypes(folder, config)
    assert list(precision.overrides) == [GATE, "model.layers.1.mlp.gate_proj", "model.norm"]
    found = {
        path: (policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs)
        for path in (None, "model.layers.0", GATE, "model.norm")
        for policy in [precision.policy(path)]
    }
    assert found == {
        None: (BF16, BF16, None, True),
        "model.layers.0": (BF16, BF16, None, False),
        GATE: (F32, BF16, BF16, True),
        "model.norm": (BF16, BF16, BF16, False),
    }


@pytest.mark.parametrize(("family", "is_cast"), [("qwen3_vl", False), ("smolvlm", True)])
def test_inputs_of_a_vision_tower_are_cast_unless_it_casts_them_itself(family, is_cast):
    model = tiny_vision_model(family)
    precision = Precision(model, EngineConfig(param_dtype="bfloat16"))
    assert {precision.policy(path).cast_forward_inputs for path in vision_paths(model)} == {is_cast}
    assert precision.policy(None).cast_forward_inputs


def test_units_inside_an_override_compute_as_it_does_and_hand_on_what_is_around_them(folder):
    """The layers of a model are units of their own, and so are modules with another override inside them."""
    overrides = [
        {"module": "model", "param_dtype": "bfloat16", "cast_forward_inputs": False},
        {"module": GATE, "param_dtype": "float32"},
    ]
    precision, kept = kept_dtypes(folder, FrozenEngineConfig(module_precision=overrides, param_dtype="float16"))
    found = {
        path: (policy.param_dtype, policy.output_dtype, policy.cast_forward_inputs)
        for path in (None, "model", "model.layers.0", GATE, "lm_head")
        for policy in [precision.policy(path)]
    }
    assert found == {
        None: (F16, None, True),
        "model": (BF16, F16, False),
        "model.layers.0": (BF16, None, False),
        GATE: (F32, BF16, True),
        "lm_head": (F16, None, False),
    }
    assert kept["model.layers.0.self_attn.q_proj.weight"] == kept["model.norm.weight"] == BF16
    assert kept["lm_head.weight"] == F16


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("model.layers.*.mlp", ["model.layers.0.mlp", "model.layers.1.mlp"]),
        ("model.layers.0.*_layernorm", [f"model.layers.0.{n}_layernorm" for n in ("input", "post_attention")]),
        ("*.norm", ["model.norm"]),
        ("model.layers.1", ["model.layers.1"]),
    ],
)
def test_star_stands_for_one_part_of_a_name(folder, pattern, matched):
    config = EngineConfig(module_precision=[{"module": pattern, "param_dtype": "bfloat16"}])
    assert list(kept_dtypes(folder, config)[0].overrides) == matched


@pytest.mark.parametrize("pattern", ["model.layers.*.mlp.gate", "layers.0", "model.*.gate_proj", "model.layers.2"])
def test_name_that_matches_nothing_is_refused_with_names_that_would(folder, pattern):
    """Trap 19."""
    config = EngineConfig(module_precision=[{"module": pattern}])
    with pytest.raises(ConfigError) as error:
        kept_dtypes(folder, config)
    assert str(error.value).startswith(
        f"engine.module_precision: {pattern} matches no module of LlamaForCausalLM; its modules have names such as "
    )
    shown = str(error.value).rsplit("such as ", 1)[1].split(", ")
    assert set(shown) <= {name for name, _ in build_on_meta(folder).named_modules()}


def test_an_entry_without_a_module_is_refused():
    with pytest.raises(ConfigError, match=r"module_precision.*module=''.* at least 1 character"):
        EngineConfig.parse({"module_precision": [{"module": ""}]}, origin="the command line")


def test_a_star_alone_does_not_stand_for_the_whole_model(folder):
    config = EngineConfig(module_precision=[{"module": "*", "param_dtype": "bfloat16"}])
    assert list(kept_dtypes(folder, config)[0].overrides) == ["model", "lm_head"]


def test_an_entry_without_effect_is_refused(folder):
    """A module without parameters may still compute its inputs in another dtype."""
    with pytest.raises(ConfigError) as error:
        kept_dtypes(folder, EngineConfig(module_precision=[{"module": "model.rotary_emb"}]))
    assert str(error.value) == (
        "engine.module_precision: model.rotary_emb has no parameters and computes in engine.param_dtype anyway, so "
        "this entry has no effect; set its param_dtype, or remove it"
    )
    other = EngineConfig(module_precision=[{"module": "model.layers.*.mlp.act_fn", "param_dtype": "bfloat16"}])
    assert len(kept_dtypes(folder, other)[0].overrides) == 2


def seen_dtypes(folder, overrides, train):
    """Of a gate projection: what its forward is given, what its weight is then, and what it returns."""
    seen = []

    def note(module, args, output):
        seen.append((args[0].dtype, module.weight.dtype, output.dtype))

    options = {"param_dtype": "bfloat16", "module_precision": overrides}
    if train:
        engine = TrainEngine.build(
            Path(folder), EngineConfig(**options), device=CPU, optimizer=OptimizerConfig(learning_rate=0.1)
        )
    else:
        engine = TrainEngine.build(Path(folder), FrozenEngineConfig(**options), device=CPU)
    module = engine._model.hf_model.get_submodule(GATE)
    forward = type(module).forward

    def spy(x):
        out = forward(module, x)
        note(module, (x,), out)
        return out

    module.forward = spy
    module.register_forward_hook(lambda _module, _args, out: seen.append(out.dtype))
    step = pack(random_samples([6, 5]), num_shards=1, max_tokens=16)
    if train:
        engine.forward_backward(step.shards[0], sft_loss, step.denominators)
        seen.append(module.weight.grad.dtype)
    else:
        engine.forward(step.shards[0])
        seen.append(module.weight.dtype)
    return seen


@pytest.mark.parametrize("train", [True, False])
def test_module_with_an_override_computes_in_its_own_dtype_and_hands_on_the_engines(run_ranks, folder, train):
    override = {"module": GATE, "param_dtype": "float32"}
    [seen] = run_ranks(seen_dtypes, 1, str(folder), [override], train)
    assert seen == [(F32, F32, F32), BF16, F32]
    [seen] = run_ranks(seen_dtypes, 1, str(folder), [], train)
    assert seen == [(BF16, BF16, BF16), BF16, F32 if train else BF16]


def uncast_inputs(folder, cast):
    """What reaches a norm in bfloat16 of a model in float32, and its weight then."""
    overrides = [{"module": "model.norm", "param_dtype": "bfloat16", "cast_forward_inputs": cast}]
    engine = TrainEngine.build(Path(folder), FrozenEngineConfig(module_precision=overrides), device=CPU)
    norm = engine._model.hf_model.model.norm
    seen = []
    forward = type(norm).forward

    def spy(hidden):
        seen.append((hidden.dtype, norm.weight.dtype))
        return forward(norm, hidden)

    norm.forward = spy
    engine.forward(pack(random_samples([6]), num_shards=1, max_tokens=16).shards[0])
    return seen


@pytest.mark.parametrize("cast", [True, False])
def test_inputs_come_as_they_are_where_they_are_not_cast(run_ranks, folder, cast):
    [seen] = run_ranks(uncast_inputs, 1, str(folder), cast)
    assert seen == [(BF16 if cast else F32, BF16)]


def calls_of(folder, options, path):
    """Of a module in a training step: what it is given, what it returns, its weight's gradient; where it is kept."""
    calls = []
    engine = TrainEngine.build(
        Path(folder), EngineConfig(param_dtype="bfloat16", **options), device=CPU, optimizer=OptimizerConfig()
    )
    module = engine._model.hf_model.get_submodule(path)
    module.register_forward_hook(lambda _module, args, outputs: calls.append((args, outputs)))
    step = pack(random_samples([9, 7, 8, 6], vocab=97), num_shards=dist.get_world_size(), max_tokens=16)
    engine.forward_backward(step.shards[dist.get_rank()], sft_loss, step.denominators)
    grads = [parameter.grad.full_tensor() for parameter in module.parameters() if parameter.grad is not None]
    return calls[0], grads, {parameter.dtype for parameter in module.parameters()}


KEPT = {
    "deepseek_v3": "model.layers.1.mlp.gate",
    "hunyuan_v1_moe": "model.layers.1.mlp.gate",
    "ernie4_5_moe": "model.layers.1.mlp.gate",
    "nemotron_h": "model.layers.1.mixer.gate",
    "hy_v4": "model.layers.1.attn_hc",
}
"""Modules whose weights transformers keeps in float32: routers, and a hyper-connection."""


@pytest.mark.parametrize("family", KEPT)
def test_modules_that_transformers_keeps_in_float32_compute_as_there(run_ranks, tmp_path, family):
    """Else the trainer rounds their weights; routers send tokens to other experts than in the rollout engine."""
    save_model(family, FAMILIES[family], tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16).get_submodule(KEPT[family])
    [((args, outputs), grads, dtypes)] = run_ranks(calls_of, 1, str(tmp_path), {}, KEPT[family])
    assert [arg.dtype for arg in args] == [BF16]
    assert dtypes == {F32}
    for found, expected in zip(outputs, loaded(*args), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    rounded = copy.deepcopy(loaded).to(BF16)
    assert not torch.equal(outputs[0].float(), rounded(*args)[0].float())
    for _, of_two, _ in run_ranks(calls_of, 2, str(tmp_path), {}, KEPT[family]):
        torch.testing.assert_close(of_two, grads, rtol=0.05, atol=1e-3)


def logprobs_of(folder, tokens, units):
    config = EngineConfig(param_dtype="bfloat16", wrap_policy={"transformer_layer_cls_to_wrap": units})
    engine = TrainEngine.build(Path(folder), config, device=CPU, optimizer=OptimizerConfig())
    sample = Sample(uid="0", token_ids=tokens, loss_mask=torch.arange(len(tokens)) > 0)
    return engine.forward(pack([sample], num_shards=1, max_tokens=64).shards[0])[0].logprobs


@pytest.mark.parametrize(
    ("family", "unit"),
    [("ernie4_5_moe", "Ernie4_5_MoeMLP"), ("olmo2", "Olmo2Attention")],
)
def test_what_a_model_hands_on_in_float32_stays_so_whatever_the_units(run_ranks, tmp_path, family, unit):
    """Angles of rotary embeddings, which the rollout engine does not round either. Rounded, the logprobs of these
    models differ by 0.015 to 0.03 from transformers', else by 0.003."""
    save_model(family, FAMILIES[family], tmp_path)
    tokens = torch.randint(3, 97, (60,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = reference_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16), tokens)
    [found] = run_ranks(logprobs_of, 1, str(tmp_path), tokens, None)
    assert (found - expected).abs().mean() < 0.005
    [of_other_units] = run_ranks(logprobs_of, 1, str(tmp_path), tokens, [unit])
    assert torch.equal(found, of_other_units)


def test_entry_for_a_router_and_tiled_mlps_are_before_its_familys_dtype(run_ranks, tmp_path):
    save_model("deepseek_v3", FAMILIES["deepseek_v3"], tmp_path)
    path = KEPT["deepseek_v3"]
    for options in (
        {"module_precision": [{"module": "model.layers.*.mlp.gate", "param_dtype": "bfloat16"}]},
        {"apply_tiled_mlp": True},
    ):
        [((args, outputs), _, _)] = run_ranks(calls_of, 1, str(tmp_path), options, path)
        rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16).get_submodule(path).to(BF16)
        torch.testing.assert_close(outputs[0].float(), rounded(*args)[0].float(), rtol=0, atol=1e-2)


def sent_weights(folder, options):
    engine = TrainEngine.build(
        Path(folder),
        EngineConfig(param_dtype="bfloat16", allow_unproven=True, **options),
        device=CPU,
        optimizer=OptimizerConfig(),
    )
    return {name: tensor.clone() for name, tensor in engine.named_weights(BF16)}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("ernie4_5_vl_moe", {}),  # no word reaches its router of image tokens
        ("olmo_hybrid", {"lora": {"rank": 2}}),
        ("kimi_linear", {"lora": {"rank": 2}}),
        ("hy_v4", {"lora": {"rank": 2}}),
        ("deepseek_v3", {"freeze_router": True, "apply_tiled_mlp": True}),
    ],
)
def test_what_is_frozen_is_exported_and_synced_as_it_was_loaded(run_ranks, tmp_path, family, options):
    """Also what transformers keeps in float32 and FSDP casts where it is gathered."""
    save_model(family, FAMILIES[family], tmp_path)
    loaded = language_model_of(AutoConfig.from_pretrained(tmp_path)).from_pretrained(tmp_path, dtype=BF16).state_dict()
    assert any(tensor.dtype == F32 and not torch.equal(tensor, tensor.to(BF16)) for tensor in loaded.values())
    for sent in run_ranks(sent_weights, 2, str(tmp_path), options):
        for name, tensor in sent.items():
            assert tensor.dtype == loaded[name].dtype, name
            assert torch.equal(tensor, loaded[name]), name


def test_parameters_that_no_class_trains_choose_experts_in_float32(run_ranks, tmp_path):
    """AFMoE's bias stands beside the experts and not in the router: FSDP would cast it."""
    options = FAMILIES["afmoe"] | {"num_experts": 32, "num_experts_per_tok": 4}
    model = random_model("afmoe", options)
    biases = [tensor for name, tensor in model.state_dict().items() if name.endswith("expert_bias")]
    for bias in biases:
        bias.copy_(3 + 0.3 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(0)))
    model.save_pretrained(tmp_path)
    tokens = torch.randint(3, 97, (60,), generator=torch.Generator().manual_seed(3))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    with torch.no_grad():
        expected = reference_logprobs(loaded, tokens)
    [found] = run_ranks(logprobs_of, 1, str(tmp_path), tokens, None)
    assert (found - expected).abs().max() < 0.02
    for name, tensor in loaded.state_dict().items():
        if name.endswith("expert_bias"):
            tensor.copy_(tensor.to(BF16))
    with torch.no_grad():
        assert (reference_logprobs(loaded, tokens) - expected).abs().max() > 0.05


def test_frozen_routers_in_float32_are_kept_so(tmp_path):
    save_model("deepseek_v3", FAMILIES["deepseek_v3"], tmp_path)
    for dtype, kept in (("bfloat16", BF16), ("float16", F16), ("float32", F32)):
        precision, dtypes = kept_dtypes(tmp_path, FrozenEngineConfig(param_dtype=dtype))
        router = dtypes.pop("model.layers.1.mlp.gate.weight")
        assert router == F32
        assert set(dtypes.values()) == {kept}
        assert precision.kept == (set() if dtype == "float32" else {"model.layers.1.mlp.gate"})


@pytest.mark.parametrize(("capability", "is_told"), [("AVX2", True), ("AVX512", False)])
def test_a_processor_without_instructions_for_a_dtype_is_told(monkeypatch, capability, is_told):
    for dtype in ("bf16", "fp16"):
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{dtype}_supported", lambda: not is_told)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert emulated_dtype(F32) is None
    for dtype, name in ((BF16, "bfloat16"), (F16, "float16")):
        expected = (
            f"param_dtype={name}: this processor ({capability}) has no instructions for {name} and takes many times as "
            "long as in float32; set param_dtype=float32"
        )
        assert emulated_dtype(dtype) == (expected if is_told else None)


def test_on_an_accelerator_no_processor_is_looked_at(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert emulated_dtype(BF16) is None
