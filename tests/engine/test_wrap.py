import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from family_table import FAMILIES as FAMILY_TABLE
from family_table import random_model, save_model
from ranks import RankError
from tiny_models import random_samples, tiny_folder
from torch.distributed.fsdp import FSDPModule
from transformers.models.gemma3 import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from shardwise.config import (
    ConfigError,
    EngineConfig,
    FrozenEngineConfig,
    LoraConfig,
    OptimizerConfig,
    WrapPolicyConfig,
)
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.engine.lora import inject_lora
from shardwise.engine.mesh import ParallelDims
from shardwise.engine.model import build_on_meta, build_sharded
from shardwise.engine.precision import Precision
from shardwise.engine.wrap import Units, layer_paths, padding_warning
from shardwise.recipes.losses import sft_loss

CPU = torch.device("cpu")
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = ["model.layers.0", "model.layers.1"]
LANGUAGE_LAYERS = ["model.language_model.layers.0", "model.language_model.layers.1"]


def qwen_vl():
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    with torch.device("meta"):
        return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=TEXT, vision_config=vision))


def gemma_vl():
    text = TEXT | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    with torch.device("meta"):
        return Gemma3ForConditionalGeneration(config)


def ovis():
    return random_model("ovis2", FAMILY_TABLE["ovis2"])


def qwen_moe():
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TEXT, **experts))


@pytest.mark.parametrize(
    ("build", "vision_blocks"),
    [
        (qwen_vl, [f"model.visual.blocks.{i}" for i in range(3)]),
        (gemma_vl, [f"model.vision_tower.encoder.layers.{i}" for i in range(3)]),
        (ovis, ["model.vision_tower.transformer.encoder.layers.0"]),
    ],
)
def test_vision_blocks_and_decoder_layers_are_units_without_being_named(build, vision_blocks):
    """Gemma 3 also names the vision tower's embeddings and pooling head in `_no_split_modules`: no layers. Ovis 2 names
    the attention of a block."""
    assert layer_paths(build(), WrapPolicyConfig()) == [*vision_blocks, *LANGUAGE_LAYERS]


def test_named_classes_are_units_in_the_order_of_the_forward_pass():
    names = ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"]
    expected = [*(f"model.visual.blocks.{i}" for i in range(3)), *LANGUAGE_LAYERS]
    for order in (names, names[::-1]):
        assert layer_paths(qwen_vl(), WrapPolicyConfig(transformer_layer_cls_to_wrap=order)) == expected
    alone = WrapPolicyConfig(transformer_layer_cls_to_wrap=["Qwen3MoeAttention"])
    assert layer_paths(qwen_moe(), alone) == [f"{layer}.self_attn" for layer in LAYERS]


def test_of_an_adapted_module_the_unit_is_the_outermost_adapter():
    """It reads the weights before it calls the module, so it has to be what gathers them."""
    model = qwen_moe()
    inject_lora(model, LoraConfig(target_modules=[], target_parameters=["gate_up_proj", "down_proj"]))
    named = WrapPolicyConfig(transformer_layer_cls_to_wrap=["Qwen3MoeExperts"])
    paths = layer_paths(model, named)
    assert paths == [f"{layer}.mlp.experts" for layer in LAYERS]
    assert {type(model.get_submodule(path)).__name__ for path in paths} == {"ParamWrapper"}


def test_a_class_that_holds_others_of_itself_is_refused():
    """peft's adapters of a Linear are Linears, inside one that is called so too."""
    model = qwen_moe()
    inject_lora(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError) as error:
        layer_paths(model, WrapPolicyConfig(transformer_layer_cls_to_wrap=["Linear"]))
    assert str(error.value) == (
        "engine.wrap_policy.transformer_layer_cls_to_wrap: model.layers.0.self_attn.q_proj.lora_A.default is inside "
        "model.layers.0.self_attn.q_proj; they are of one class; name another"
    )


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            {"transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayr"]},
            "engine.wrap_policy.transformer_layer_cls_to_wrap: Qwen3MoeDecoderLayr matches no module of "
            "Qwen3MoeForCausalLM; its modules are of Qwen3MoeDecoderLayer, ",
        ),
        (
            {"moe_experts": ["Qwen3Experts"]},
            "engine.wrap_policy.moe_experts: Qwen3Experts matches no module of Qwen3MoeForCausalLM; its modules are of "
            "Qwen3MoeExperts, ",
        ),
        (
            {"transformer_layer_cls_to_wrap": ["Qwen3MoeAttention", "Qwen3MoeDecoderLayer"]},
            "engine.wrap_policy.transformer_layer_cls_to_wrap: model.layers.0.self_attn is inside model.layers.0; name "
            "the class of one of them",
        ),
        (
            {"transformer_layer_cls_to_wrap": ["Qwen3MoeForCausalLM"]},
            "engine.wrap_policy.transformer_layer_cls_to_wrap: Qwen3MoeForCausalLM is the whole model, which is the "
            "root unit; name classes inside it",
        ),
        (
            {"transformer_layer_cls_to_wrap": ["Qwen3MoeRotaryEmbedding"]},
            "engine.wrap_policy.transformer_layer_cls_to_wrap: Qwen3MoeRotaryEmbedding matches no module with "
            "parameters of Qwen3MoeForCausalLM; its modules are of Qwen3Moe",
        ),
        (
            {"moe_experts": ["Qwen3MoeDecoderLayer"]},
            "engine.wrap_policy.moe_experts: model.layers.0 is an FSDP unit already, as a layer; name a class inside "
            "it: its modules are of Qwen3MoeExperts, ",
        ),
    ],
)
def test_wrong_class_name_is_refused_with_those_of_the_model(policy, message):
    """Trap 19: a wrap class that matches nothing would leave the whole model in one unit."""
    model, config = qwen_moe(), EngineConfig(wrap_policy=policy)
    with pytest.raises(ConfigError) as error:
        Units(model, config, Precision(model, config))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("key", ["wrap_embeddings", "wrap_lm_output"])
def test_tied_weights_cannot_be_units(tmp_path, key):
    model, config = build_on_meta(tiny_folder("qwen3", tmp_path)), EngineConfig(wrap_policy={key: True})
    with pytest.raises(ConfigError) as error:
        Units(model, config, Precision(model, config))
    assert str(error.value) == (
        f"engine.wrap_policy.{key}=true: the embedding and the output projection of Qwen3ForCausalLM are one weight "
        "(tie_word_embeddings), which stays in the root unit; set it to false"
    )


@pytest.mark.parametrize(
    ("options", "inner", "by"),
    [
        (
            {"wrap_policy": {"moe_experts": ["Qwen3MoeExperts"]}},
            "model.layers.0.mlp.experts",
            "engine.wrap_policy.moe_experts=['Qwen3MoeExperts']",
        ),
        (
            {"module_precision": [{"module": "model.layers.1.mlp.gate"}]},
            "model.layers.1.mlp.gate",
            "engine.module_precision=model.layers.1.mlp.gate",
        ),
        (
            {"module_precision": [{"module": "model.layers.1.mlp"}]},
            "model.layers.1.mlp",
            "engine.module_precision=model.layers.1.mlp",
        ),
    ],
)
def test_what_is_computed_in_pieces_must_be_one_unit(options, inner, by):
    model, config = qwen_moe(), EngineConfig(**options)
    units = Units(model, config, Precision(model, config))
    outer = ".".join(inner.split(".")[:4])
    with pytest.raises(ConfigError) as error:
        units.require_whole([f"{layer}.mlp" for layer in LAYERS], "engine.apply_tiled_mlp=true")
    assert str(error.value) == (
        f"engine.apply_tiled_mlp=true computes {outer} piece by piece, but "
        f"{'it' if inner == outer else f'{inner} inside it'} is an FSDP unit of its own ({by}) and would be gathered "
        "for every piece; remove one of the two"
    )
    units.require_whole([f"{layer}.self_attn" for layer in LAYERS], "anything")


def parameters_of_units(folder, options):
    """Of every unit, in the order it is returned: the names of the parameters it gathers."""
    config = EngineConfig(**options)
    mesh = ParallelDims.from_sizes(world_size=dist.get_world_size(), fsdp_size=None, ulysses_size=1).build("cpu")
    sharded, _ = build_sharded(Path(folder), config, mesh, device=CPU)
    name_of = {id(parameter): name for name, parameter in sharded.model.hf_model.named_parameters()}
    return [[name_of[id(parameter)] for parameter in owned_parameters(unit)] for unit in sharded.units]


def owned_parameters(unit):
    """Those below a unit that no inner unit has."""
    inner = {
        id(p)
        for child in unit.modules()
        if child is not unit and isinstance(child, FSDPModule)
        for p in child.parameters()
    }
    return [p for p in unit.parameters() if id(p) not in inner]


def test_units_own_what_the_policy_gives_them(run_ranks, tmp_path):
    folder = str(tiny_folder("llama", tmp_path))
    ends = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    [units] = run_ranks(parameters_of_units, 1, folder, {})
    assert units[2] == ends
    assert [len(unit) for unit in units] == [9, 9, 3]
    assert all(name.startswith(layer) for layer, unit in zip(LAYERS, units, strict=False) for name in unit)
    [units] = run_ranks(
        parameters_of_units, 1, folder, {"wrap_policy": {"wrap_embeddings": True, "wrap_lm_output": True}}
    )
    assert [units[0], units[3], units[4]] == [ends[:1], ends[2:], ends[1:2]]
    overrides = [{"module": "model.layers.*.mlp", "param_dtype": "bfloat16"}]
    [units] = run_ranks(parameters_of_units, 1, folder, {"module_precision": overrides})
    assert [len(unit) for unit in units] == [6, 3, 6, 3, 3]
    assert units[1] == [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    [units] = run_ranks(
        parameters_of_units, 1, folder, {"wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaMLP"]}}
    )
    assert [len(unit) for unit in units] == [3, 3, 15]


def units_of_a_moe():
    """With expert units, whole parameters of each kind of unit."""
    model = qwen_moe()
    config = EngineConfig(wrap_policy={"moe_experts": ["Qwen3MoeExperts"]}, activation_checkpointing="full")
    units = Units(model, config, Precision(model, config))
    mesh = ParallelDims.from_sizes(world_size=dist.get_world_size(), fsdp_size=None, ulysses_size=1).build("cpu")
    root = torch.nn.Module()
    root.hf_model, root.head = model, model.lm_head
    sharded = units.shard(root, model, model.lm_head, mesh)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[name_of[id(parameter)] for parameter in owned_parameters(unit)] for unit in sharded]


def test_experts_are_units_inside_their_layer(run_ranks):
    for units in run_ranks(units_of_a_moe, 2):
        for place, layer in enumerate(LAYERS):
            experts = [f"{layer}.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
            assert units[2 * place + 1] == experts
            assert all(name.startswith(layer) and name not in experts for name in units[2 * place])
        assert units[4] == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


def build_engine(folder, options):
    TrainEngine.build(Path(folder), FrozenEngineConfig(**options), device=CPU)


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (
            4,
            {"reshard_after_forward": 3},
            "engine.reshard_after_forward=3 does not divide the 4 ranks that weights are sharded over; use true, "
            "false, 2, 4",
        ),
        (
            2,
            {"reshard_after_forward": 4},
            "engine.reshard_after_forward=4 does not divide the 2 ranks that weights are sharded over; use true, "
            "false, 2",
        ),
        (
            1,
            {"forward_prefetch": 2},
            "engine.forward_prefetch=2 would gather the weights of 2 layers beside the one that computes, and the "
            "model has 2 layers; use at most 1",
        ),
        (
            1,
            {"module_precision": [{"module": "lm_head"}]},
            "engine.module_precision=lm_head makes an FSDP unit of lm_head, which holds the output projection; a head "
            "of its own applies that in float32. Name others; engine.wrap_policy.wrap_lm_output=true makes it a unit",
        ),
    ],
)
def test_impossible_units_are_refused(run_ranks, tmp_path, world_size, options, message):
    with pytest.raises(RankError) as error:
        run_ranks(build_engine, world_size, str(tiny_folder("llama", tmp_path)), options)
    assert f"ConfigError: {message}\n" in str(error.value)


def test_a_unit_that_would_hold_a_tied_projection_is_refused_with_what_named_it(run_ranks, tmp_path):
    folder = str(tiny_folder("qwen3", tmp_path))
    units = "transformer_layer_cls_to_wrap"
    for options, named, path in [
        ({"module_precision": [{"module": "model.embed_*"}]}, "module_precision=model.embed_*", "model.embed_tokens"),
        ({"wrap_policy": {units: ["Linear"]}}, f"wrap_policy.{units}=['Linear']", "lm_head"),
        ({"wrap_policy": {units: ["Qwen3Model"]}}, f"wrap_policy.{units}=['Qwen3Model']", "model"),
        ({"wrap_policy": {"moe_experts": ["Qwen3Model"]}}, "wrap_policy.moe_experts=['Qwen3Model']", "model"),
    ]:
        with pytest.raises(RankError) as error:
            run_ranks(build_engine, 1, folder, options)
        assert (
            f"ConfigError: engine.{named} makes an FSDP unit of {path}, which holds the output projection; a head of "
            "its own applies that in float32. Name others\n"
        ) in str(error.value)


def gradients(folder, options):
    """The whole gradient of one step."""
    engine = TrainEngine.build(Path(folder), EngineConfig(**options), device=CPU, optimizer=OptimizerConfig())
    step = pack(random_samples([9, 7, 7, 5, 4]), num_shards=dist.get_world_size(), max_tokens=12)
    engine.forward_backward(step.shards[dist.get_rank()], sft_loss, step.denominators)
    return {name: p.grad.full_tensor() for name, p in engine._model.hf_model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {"wrap_policy": {"wrap_embeddings": True, "wrap_lm_output": True}},
        {"wrap_policy": {"wrap_lm_output": True}, "reshard_after_forward": False},
        {"wrap_policy": {"wrap_embeddings": True}, "module_precision": [{"module": "model.embed_tokens"}]},
        {"wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaMLP", "LlamaAttention"]}},
        pytest.param({"reshard_after_forward": False}, marks=pytest.mark.full),
        {"reshard_after_forward": 2},
        pytest.param({"reshard_after_forward": 4}, marks=pytest.mark.full),
        {"forward_prefetch": 1, "backward_prefetch": 1},
    ],
    ids=lambda options: " ".join(options),
)
def test_gradients_do_not_depend_on_the_units(run_ranks, tmp_path, options):
    folder = str(tiny_folder("llama", tmp_path))
    expected = run_ranks(gradients, 4, folder, {})[0]
    found = run_ranks(gradients, 4, folder, options)[0]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-7, msg=name)
        assert gradient.any(), name


def prefetched(folder, options):
    """Of every layer the layers whose weights are gathered while it computes, forward and backward."""
    engine = TrainEngine.build(Path(folder), EngineConfig(**options), device=CPU, optimizer=OptimizerConfig())
    states = [layer._get_fsdp_state() for layer in engine._model.hf_model.get_decoder().layers]
    return [
        [
            [states.index(other) for other in found]
            for found in (state._states_to_forward_prefetch, state._states_to_backward_prefetch)
        ]
        for state in states
    ]


def test_weights_of_so_many_layers_are_gathered_ahead(run_ranks, tmp_path):
    folder = str(tiny_folder("llama", tmp_path, num_hidden_layers=4))
    assert run_ranks(prefetched, 1, folder, {}) == [[[[], []]] * 4]
    (found,) = run_ranks(prefetched, 1, folder, {"forward_prefetch": 2, "backward_prefetch": 1})
    assert found == [[[1, 2], []], [[2, 3], [0]], [[3], [1]], [[], [2]]]


def test_weights_of_a_tower_that_nothing_runs_through_are_not_gathered_ahead(run_ranks, tmp_path):
    save_model("ovis2", FAMILY_TABLE["ovis2"], tmp_path)
    (found,) = run_ranks(prefetched, 1, str(tmp_path), {"forward_prefetch": 1, "backward_prefetch": 1})
    assert found == [[[1], []], [[], [0]]]


@pytest.mark.parametrize(("num_ranks", "times"), [(128, None), (192, None), (256, "2.0"), (1024, "7.9")])
def test_weights_that_are_gathered_several_times_over_are_warned_of(num_ranks, times):
    """Qwen3-235B's shapes, of one layer."""
    experts = {"experts.gate_up_proj": (128, 3072, 4096), "experts.down_proj": (128, 4096, 1536)}
    shapes = experts | {"self_attn.q_proj.weight": (8192, 4096), "input_layernorm.weight": (4096,)}
    found = padding_warning(((name, shape, num_ranks) for name, shape in shapes.items()), fsdp_size=num_ranks)
    assert found == (
        None
        if times is None
        else f"engine.fsdp_size={num_ranks}: every rank gathers {times} times the weights, for FSDP pads "
        f"them: experts.gate_up_proj has 128 rows for {num_ranks} ranks; with fsdp_size=128 and replicas it gathers "
        "them once"
    )


def test_the_fsdp_size_that_is_named_divides_the_ranks():
    found = padding_warning([("experts.down_proj", (128, 64, 64), 320)], fsdp_size=320)
    assert "128 rows for 320 ranks; with fsdp_size=80 and replicas" in found


def test_of_experts_that_ranks_share_the_warning_counts_the_ranks_that_shard_them():
    """8 of 64 experts over 32 of 256 ranks: with a quarter of the ranks 8 over 8."""
    found = padding_warning([("experts.down_proj", (8, 64, 64), 32)], fsdp_size=256)
    assert "8 rows for 32 ranks; with fsdp_size=64 and replicas" in found


def told_while_building(folder):
    mesh = ParallelDims.from_sizes(world_size=dist.get_world_size(), fsdp_size=None, ulysses_size=1).build("cpu")
    with redirect_stderr(io.StringIO()) as told:
        build_sharded(Path(folder), EngineConfig(), mesh, device=torch.device("cpu"))
    return told.getvalue()


def test_a_run_is_told_of_padding_once(run_ranks, tmp_path):
    save_model("qwen3_moe", FAMILY_TABLE["qwen3_moe"] | {"num_experts": 2, "moe_intermediate_size": 256}, tmp_path)
    first, *others = run_ranks(told_while_building, 4, str(tmp_path))
    assert first.count("times the weights, for FSDP pads them: model.layers.0.mlp.experts.gate_up_proj has 2 rows") == 1
    assert others == [""] * 3
