import re
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from family_table import FAMILIES, random_model
from sharded_lora import SAVED, VARIANTS, build, logits, loss_and_gradients, meta_model, samples, wholes
from tiny_models import tiny_folder, tiny_vision_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from shardwise.config import ConfigError, EngineConfig, LoraConfig
from shardwise.engine.files.adapters import adapter_weights
from shardwise.engine.lora import adapted_weights, adapter_names, adapters_off, base_names, fused_experts, inject_lora
from shardwise.engine.precision import Precision

ENDINGS = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: str(tiny_folder(family, tmp_path_factory.mktemp(family))) for family in ("qwen3", "llama", "gpt2")}


def injected(folder, param_dtype=torch.float32, **lora):
    model = meta_model(folder)
    inject_lora(model, LoraConfig(**lora))
    Precision(model, EngineConfig(param_dtype=str(param_dtype).removeprefix("torch."))).cast_parameters(model)
    return model


@pytest.mark.filterwarnings("error")  # peft's, where `fan_in_fan_out` is not what the layers are
@pytest.mark.parametrize(("family", "kind"), [("llama", torch.nn.Linear), ("gpt2", Conv1D)])
def test_all_linear_adapts_every_linear_layer_but_the_head(folders, family, kind):
    linear = {name for name, part in meta_model(folders[family]).named_modules() if isinstance(part, kind)}
    assert len(linear) >= 2 * 4
    model = injected(folders[family], rank=2)
    adapted = {name.rpartition(".lora_A.")[0] for name in adapter_names(model) if ".lora_A." in name}
    assert adapted == linear - {"lm_head"}


def test_names_map_to_model_files_and_adapter_files(folders):
    model = injected(
        folders["llama"], target_modules=["0.self_attn.q_proj"], modules_to_save=["lm_head"], use_dora=True
    )
    plain = meta_model(folders["llama"])
    names = base_names(model)
    assert list(names) == list(model.state_dict())
    assert sorted(name for name in names.values() if name) == sorted(plain.state_dict())
    layer = "model.layers.0.self_attn.q_proj"
    assert names[f"{layer}.base_layer.weight"] == f"{layer}.weight"
    assert names["lm_head.original_module.weight"] == "lm_head.weight"
    assert adapter_names(model) == {
        f"{layer}.lora_A.default.weight": f"base_model.model.{layer}.lora_A.weight",
        f"{layer}.lora_B.default.weight": f"base_model.model.{layer}.lora_B.weight",
        f"{layer}.lora_magnitude_vector.default.weight": f"base_model.model.{layer}.lora_magnitude_vector",
        "lm_head.modules_to_save.default.weight": "base_model.model.lm_head.weight",
    }
    assert {name for name, base in names.items() if base is None} == set(adapter_names(model))


def test_model_without_adapters_keeps_its_names(folders):
    model = meta_model(folders["qwen3"])
    assert all(name == base for name, base in base_names(model).items())
    assert adapter_names(model) == {}


def test_only_adapters_and_modules_to_save_are_trained_in_float32(folders):
    model = injected(folders["qwen3"], torch.bfloat16, modules_to_save=["model.norm"], use_dora=True)
    trained = set(adapter_names(model))
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "meta"
        assert parameter.requires_grad == (name in trained), name
        assert parameter.dtype == (torch.float32 if name in trained else torch.bfloat16), name
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("family", "lora", "message"),
    [
        ("llama", {"target_modules": ["q_prj"]}, f"'q_prj' matches no module of LlamaForCausalLM; its linear layers end"
         f" in: {ENDINGS}"),
        ("llama", {"target_modules": "proj"}, "'proj' matches no module"),
        ("llama", {"target_modules": []}, "target_modules=[] leaves no layer of LlamaForCausalLM to adapt"),
        ("llama", {"target_modules": ["embed_tokens"]}, "model.embed_tokens is Embedding; this version adapts linear"),
        ("llama", {"target_modules": ["q_proj", "mlp"]}, "model.layers.0.mlp is LlamaMLP; this version adapts linear"),
        ("qwen3", {"target_modules": ["lm_head"]}, "lm_head is the output head, which gets no adapter; put it into "),
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["q_proj"]}, "['q_proj'] leaves no layer of Llama"),
        ("llama", {"modules_to_save": ["score"]}, "modules_to_save: 'score' matches no module of LlamaForCausalLM"),
        ("llama", {"modules_to_save": ["lmhead"]}, "with parameters; its modules have names such as lm_head"),
        ("llama", {"modules_to_save": ["rotary_emb"]}, "'rotary_emb' matches no module of LlamaForCausalLM with"),
        ("llama", {"modules_to_save": ["layers"]}, "model.layers is a list of modules without a forward of its own; "
         "name its members (model.layers.0)"),
        ("llama", {"modules_to_save": ["mlp", "1.mlp.up_proj"]}, "model.layers.1.mlp.up_proj lies inside another"),
        ("qwen3", {"modules_to_save": ["lm_head"]}, "lm_head shares its weight (lm_head.weight = model."),
        ("gpt2", {"target_modules": ["c_atn"]}, "'c_atn' matches no module of GPT2LMHeadModel; its linear layers end in"
         ": c_attn, c_fc, c_proj"),
        ("gpt2", {"target_modules": ["mlp"]}, "transformer.h.0.mlp is GPT2MLP; this version adapts linear layers"),
        ("qwen3", {"modules_to_save": ["embed_tokens"]}, "model.embed_tokens shares its weight (lm_head.weight = "),
    ],
)  # fmt: skip
def test_names_that_cannot_be_used_are_refused_with_what_can(folders, family, lora, message):
    with pytest.raises(ConfigError) as error:
        injected(folders[family], **lora)
    assert message in str(error.value)


def mixture_of_experts(**options):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, moe_intermediate_size=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, num_experts=4, **options,
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config)


def test_fused_experts_are_no_linear_layers():
    model = mixture_of_experts(num_hidden_layers=1)
    inject_lora(model, LoraConfig())
    adapted = {name.split(".lora_A.")[0].rpartition(".")[2] for name in adapter_names(model) if ".lora_A." in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_what_a_vision_tower_holds_is_no_expert():
    model = random_model("gemma3", FAMILIES["gemma3"])
    assert any(p.ndim == 3 and "vision_tower" in name for name, p in model.named_parameters())
    assert fused_experts(model) == []
    assert len(fused_experts(random_model("gemma4_text", FAMILIES["gemma4_text"]))) == 8
    mixed = fused_experts(random_model("lfm2_moe", FAMILIES["lfm2_moe"]))  # the kernel of a convolution is no expert
    assert [name.rpartition(".")[2] for name in mixed] == ["gate_up_proj", "down_proj"]


EXPERTS = "model.layers.{}.mlp.experts"


def test_names_of_adapted_experts_map_to_model_files_and_adapter_files():
    model = mixture_of_experts(num_hidden_layers=2)
    plain = list(model.state_dict())
    inject_lora(model, LoraConfig(rank=3, target_modules=["0.self_attn.q_proj"], target_parameters=["gate_up_proj"]))
    names = base_names(model)
    assert list(names) == list(model.state_dict())
    assert [base for base in names.values() if base] == plain
    assert {name for name, base in names.items() if base is None} == set(adapter_names(model))
    experts = EXPERTS.format(1)
    assert names[f"{experts}.base_layer.gate_up_proj"] == f"{experts}.gate_up_proj"
    assert names[f"{experts}.base_layer.down_proj"] == f"{experts}.down_proj"
    assert adapter_names(model)[f"{experts}.lora_A.default.weight"] == f"base_model.model.{experts}.lora_A.weight"
    adapted = {name: weight.path for name, weight in adapted_weights(model).items()}
    assert adapted == {
        "model.layers.0.self_attn.q_proj.weight": "model.layers.0.self_attn.q_proj",
        **{f"{EXPERTS.format(layer)}.gate_up_proj": EXPERTS.format(layer) for layer in (0, 1)},
    }
    shapes = {name: list(model.get_parameter(name).shape) for name in adapter_names(model) if experts in name}
    assert shapes == {
        f"{experts}.lora_A.default.weight": [4 * 3, 8],  # experts x rank, hidden
        f"{experts}.lora_B.default.weight": [2 * 4, 3 * 4],  # gate and up, rank x experts
    }


def test_adapters_of_two_parameters_of_the_same_experts_lie_inside_each_other():
    """As peft nests them; files and this package tell them apart by the path."""
    model = mixture_of_experts(num_hidden_layers=1)
    plain = list(model.state_dict())
    inject_lora(model, LoraConfig(target_modules=[], target_parameters=["experts.down_proj", "experts.gate_up_proj"]))
    experts = EXPERTS.format(0)
    assert [base for base in base_names(model).values() if base] == plain
    assert {name: weight.path for name, weight in adapted_weights(model).items()} == {
        f"{experts}.down_proj": experts,
        f"{experts}.gate_up_proj": f"{experts}.base_layer",
    }
    assert set(adapter_names(model).values()) == {
        f"base_model.model.{path}.lora_{part}.weight" for path in (experts, f"{experts}.base_layer") for part in "AB"
    }


FUSED = "its fused experts are: experts.down_proj, experts.gate_up_proj"


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ["gate_up_proj"]}, "'gate_up_proj' is a bare parameter, which engine.lora.target_parameters"
         " is for, not a module of Qwen3MoeForCausalLM"),
        ({"target_modules": ["experts"]}, "experts is Qwen3MoeExperts; this version adapts linear layers, which end in:"
         " k_proj, o_proj, q_proj, v_proj, and fused experts, which target_parameters names"),
        ({"target_parameters": ["gate_up"]}, f"'gate_up' matches no parameter of Qwen3MoeForCausalLM; {FUSED}"),
        ({"target_parameters": ["experts"]}, f"'experts' matches no parameter of Qwen3MoeForCausalLM; {FUSED}"),
        ({"target_parameters": ["gate.weight"]}, f"model.layers.0.mlp.gate.weight has 2 dimensions, and fused experts "
         f"have 3; {FUSED}. Linear layers go into target_modules"),
        ({"target_parameters": ["down_proj"], "modules_to_save": ["experts"]}, "engine.lora.target_parameters="
         f"['down_proj'] leaves no experts of Qwen3MoeForCausalLM to adapt, with modules_to_save=['{EXPERTS.format(0)}"
         f"']; {FUSED}"),
    ],
)  # fmt: skip
def test_names_of_experts_that_cannot_be_used_are_refused_with_what_can(lora, message):
    with pytest.raises(ConfigError) as error:
        inject_lora(mixture_of_experts(num_hidden_layers=1), LoraConfig(**lora))
    assert message in str(error.value)


def test_a_dense_model_has_no_experts_to_adapt(folders):
    with pytest.raises(ConfigError, match=r"matches no parameter of Qwen3ForCausalLM; .* experts are: it has none"):
        injected(folders["qwen3"], target_parameters=["experts.down_proj"])


@pytest.mark.filterwarnings("ignore:The following")  # peft's, of the mapping that is then refused
@pytest.mark.parametrize("use_dora", [False, True])
def test_dense_layers_that_peft_takes_for_experts_get_no_adapter(use_dora):
    """peft maps gate_proj of such families to the fused experts, also where it is a dense layer's."""
    options = {"mlp_only_layers": [0], "num_hidden_layers": 2}
    model = mixture_of_experts(**options)
    inject_lora(model, LoraConfig(use_dora=use_dora))
    adapted = {name.split(".lora_A.")[0].rpartition(".")[2] for name in adapter_names(model) if ".lora_A." in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    lora = LoraConfig(use_dora=use_dora, target_modules=["gate_proj", "up_proj", "down_proj"])
    with pytest.raises(ConfigError, match=r"peft takes names such as gate_proj .* name other layers \(q_proj"):
        inject_lora(mixture_of_experts(**options), lora)


def test_a_router_that_is_a_linear_layer_by_class_gets_no_adapter():
    """Phi-3.5-MoE's returns three tensors."""
    from transformers import PhimoeConfig, PhimoeForCausalLM

    config = PhimoeConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, num_hidden_layers=1, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = PhimoeForCausalLM(config)
    assert isinstance(model.model.layers[0].mlp.router, torch.nn.Linear)
    inject_lora(model, LoraConfig())
    assert not any("router" in name for name in adapter_names(model))
    with pytest.raises(ConfigError, match="router is PhimoeTopKRouter; this version adapts linear layers"):
        inject_lora(model, LoraConfig(target_modules=["router"]))


LANGUAGE_MODEL = [
    f"model.language_model.layers.{layer}.{part}_proj"
    for layer in range(2)
    for part in (*(f"self_attn.{name}" for name in "qkvo"), *(f"mlp.{name}" for name in ("gate", "up", "down")))
]


@pytest.mark.parametrize("prefix", ["model.visual", "model.visual."])
@pytest.mark.parametrize(
    ("targets", "expected"),
    [("all-linear", LANGUAGE_MODEL), (["gate_proj"], [name for name in LANGUAGE_MODEL if "gate" in name])],
)
def test_a_frozen_prefix_gets_no_adapters(prefix, targets, expected):
    """The tower of Qwen2.5-VL has layers called gate_proj too."""
    with torch.device("meta"):
        model = tiny_vision_model("qwen2_5_vl")
    assert any(name.startswith("model.visual.") and "gate_proj" in name for name, _ in model.named_modules())
    inject_lora(model, LoraConfig(rank=2, target_modules=targets), left_out=[prefix])
    adapted = {name.rpartition(".lora_A.")[0] for name in adapter_names(model) if ".lora_A." in name}
    assert adapted == set(expected)
    assert not any(p.requires_grad for name, p in model.named_parameters() if name.startswith("model.visual"))


def test_a_frozen_prefix_may_have_modules_of_any_kind_under_the_names_that_get_adapters():
    """The towers of Gemma 4 hold their linear layers in modules with these names."""
    with torch.device("meta"):
        model = tiny_vision_model("gemma4")
    towers, lora = ["model.vision_tower", "model.audio_tower"], LoraConfig(target_modules=["q_proj", "v_proj"])
    with pytest.raises(ConfigError, match=r"_tower\..*_proj is Gemma4ClippableLinear; .*engine\.freeze_module_prefix$"):
        inject_lora(model, lora, left_out=towers[:1])
    inject_lora(model, lora, left_out=towers)
    adapted = {name.rpartition(".lora_A.")[0] for name in adapter_names(model) if ".lora_A." in name}
    assert adapted
    assert all(re.fullmatch(r"model\.language_model\..*\.[qv]_proj", name) for name in adapted)


def test_experts_below_a_frozen_prefix_get_no_adapters():
    model = mixture_of_experts(num_hidden_layers=2)
    lora = LoraConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    inject_lora(model, lora, left_out=["model.layers.0.mlp"])
    assert adapted_weights(model).keys() == {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.experts.down_proj",
    }


@pytest.mark.parametrize(
    ("prefixes", "lora", "message"),
    [
        (["model.visual"], {}, "'model.visual' names no module or parameter of LlamaForCausalLM; its modules have names"
         " such as "),
        (["model.layers"], {}, "engine.freeze_module_prefix=['model.layers'] leaves no layer of LlamaForCausalLM to "
         "adapt of those that engine.lora names, such as model.layers.0.self_attn.q_proj; freeze fewer modules"),
        (["model.norm"], {}, "engine.freeze_module_prefix: 'model.norm' has no effect with engine.lora, which freezes "
         "the whole base and puts no adapter into it; remove it"),
        (["model.layers.0.mlp"], {"target_modules": ["q_proj"]}, "'model.layers.0.mlp' has no effect with engine.lora"),
        (["model.layers.0"], {"modules_to_save": ["0.mlp"]}, "engine.freeze_module_prefix: 'model.layers.0' and "
         "model.layers.0.mlp, which is trained whole (engine.lora.modules_to_save, or a value head), share parameters; "
         "name others in one of the two"),
        (["model.layers.0.mlp.up_proj"], {"modules_to_save": ["0.mlp"]}, "model.layers.0.mlp, which is trained whole"),
    ],
)  # fmt: skip
def test_frozen_prefixes_that_cannot_be_used_with_adapters_are_refused(folders, prefixes, lora, message):
    with pytest.raises(ConfigError) as error:
        inject_lora(meta_model(folders["llama"]), LoraConfig(**lora), left_out=prefixes)
    assert message in str(error.value)


def randomize_adapters(model):
    """Random adapters, equal on every layout."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = 0.1 * torch.randn(parameter.shape, generator=generator)
                parameter.to_local().add_(_own_rows(noise, parameter))


def _own_rows(whole, like):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def reference_and_back(folder, lora, dtype, fsdp_size):
    """Logits with adapters, without, and with them again; whether a switch leaves any flag or gradient behind."""
    model = build(folder, lora, dtype=dtype, fsdp_size=fsdp_size)
    randomize_adapters(model)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    before = logits(model)
    with adapters_off(model):
        assert [parameter.requires_grad for parameter in model.parameters()] == flags
        without = logits(model)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    return before, without, logits(model)


@pytest.mark.parametrize(
    ("world_size", "fsdp_size"), [*(pytest.param(size, None, marks=pytest.mark.full) for size in (1, 2)), (4, 2)]
)
@pytest.mark.parametrize(
    ("family", "variant"),
    [
        *(pytest.param("llama", variant, marks=pytest.mark.full) for variant in ("lora", "dora")),
        *(("qwen3", "rslora"), ("gpt2", "dora")),
    ],
)
def test_adapters_off_is_the_base_exactly_and_adapters_come_back(
    run_ranks, folders, family, variant, world_size, fsdp_size
):
    from transformers import AutoModelForCausalLM

    lora = VARIANTS[variant].model_copy(update={"modules_to_save": SAVED[family]})
    base = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32, attn_implementation="eager")
    expected = logits(base)
    for run in run_ranks(reference_and_back, world_size, folders[family], lora, torch.float32, fsdp_size):
        for before, without, after, plain in zip(*run, expected, strict=True):
            assert torch.equal(without, plain)
            assert torch.equal(before, after)
            assert (before - plain).abs().max() > 0.1


def fresh_in_bfloat16(folder, lora):
    model = build(folder, lora, dtype=torch.bfloat16)
    with_adapters = logits(model)
    with adapters_off(model):
        return with_adapters, logits(model)


@pytest.mark.parametrize(("family", "variant"), [("llama", "lora"), ("llama", "dora"), ("gpt2", "dora")])
def test_fresh_adapters_leave_the_policy_at_its_reference_in_bfloat16(run_ranks, folders, family, variant):
    """DoRA's magnitudes are norms of the rounded weights that the forward pass sees, so they cancel."""
    for run in run_ranks(fresh_in_bfloat16, 2, folders[family], VARIANTS[variant]):
        assert all(torch.equal(with_adapters, without) for with_adapters, without in zip(*run, strict=True))


def test_head_that_is_trained_whole_switches_with_the_adapters(folders):
    """The engine reads the head's weight instead of calling it."""
    model = injected(folders["llama"], modules_to_save=["lm_head"])
    assert model.get_output_embeddings().weight is model.lm_head.modules_to_save["default"].weight
    with adapters_off(model):
        assert model.get_output_embeddings().weight is model.lm_head.original_module.weight
    assert model.get_output_embeddings().weight.requires_grad


def test_adapters_come_back_after_an_error(run_ranks, folders):
    assert run_ranks(error_inside, 1, folders["llama"]) == [True]


def error_inside(folder):
    model = build(folder, VARIANTS["lora"])
    randomize_adapters(model)
    before = logits(model)
    with pytest.raises(KeyError), adapters_off(model):
        raise KeyError
    return all(torch.equal(a, b) for a, b in zip(before, logits(model), strict=True))


@dataclass
class Collectives(TorchDispatchMode):
    """Records what FSDP gathers and reduces: the dtypes of each gather's tensors and of each reduction."""

    gathered: list[set[torch.dtype]] = field(default_factory=list)
    reduced: set[torch.dtype] = field(default_factory=set)

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.fsdp.all_gather_copy_in.default:
            self.gathered.append({tensor.dtype for tensor in args[0]})
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            self.reduced |= {args[0].dtype, args[1].dtype}
        return func(*args, **(kwargs or {}))


def mixed_precision_step(folder, lora, off_first):
    """A bfloat16 step: what the collectives carried, the gradients, and the adapters after one SGD step."""
    model = build(folder, lora, dtype=torch.bfloat16)
    randomize_adapters(model)
    units = {frozenset(p.dtype for p in layer.parameters()) for layer in model.model.layers}
    if off_first:
        with adapters_off(model):
            logits(model)
    with Collectives() as collectives:
        loss, gradients = loss_and_gradients(model, dist.get_world_size(), dist.get_rank())
    gradients = wholes(gradients)
    return units, collectives.gathered, collectives.reduced, loss, gradients


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_trap_11_unit_of_frozen_bfloat16_and_float32_adapters_gathers_one_dtype_and_reduces_float32(
    run_ranks, folders, variant
):
    """Trap 11. Also when the very first forward pass is one of the reference, without adapters."""
    lora = VARIANTS[variant].model_copy(update={"modules_to_save": SAVED["llama"]})
    exact = sum(run_ranks(float32_loss, 2, folders["llama"], lora))
    direct, after_reference = (
        run_ranks(mixed_precision_step, 2, folders["llama"], lora, off_first) for off_first in (False, True)
    )
    for run in direct + after_reference:
        units, gathered, reduced, _, gradients = run
        assert units == {frozenset({torch.bfloat16, torch.float32})}
        assert gathered
        assert all(dtypes == {torch.bfloat16} for dtypes in gathered)
        assert reduced == {torch.float32}
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    for one, other in zip(direct, after_reference, strict=True):
        assert all(torch.equal(one[4][name], gradient) for name, gradient in other[4].items())
    assert sum(run[3] for run in direct) == pytest.approx(exact, rel=0.02)


def float32_loss(folder, lora):
    model = build(folder, lora)
    randomize_adapters(model)
    return loss_and_gradients(model, dist.get_world_size(), dist.get_rank())[0]


def bfloat16_training(folder, lora):
    model = build(folder, lora, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    base = wholes({name: p for name, p in model.named_parameters() if not p.requires_grad})
    losses = []
    for _ in range(12):
        loss = torch.tensor(loss_and_gradients(model, dist.get_world_size(), dist.get_rank())[0])
        dist.all_reduce(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    after = wholes({name: p for name, p in model.named_parameters() if name in base})
    unchanged = all(torch.equal(after[name], tensor) for name, tensor in base.items())
    return losses, unchanged, {tensor.dtype for _, tensor in adapter_weights(model, torch.float32)}


@pytest.mark.parametrize("variant", [pytest.param("lora", marks=pytest.mark.full), "dora"])
def test_training_in_bfloat16_lowers_the_loss_and_leaves_the_base(run_ranks, folders, variant):
    for losses, unchanged, _ in run_ranks(bfloat16_training, 2, folders["qwen3"], VARIANTS[variant]):
        assert losses[-1] < 0.5 * losses[0]
        assert unchanged


def dropped(folder):
    lora = LoraConfig(rank=3, alpha=12, dropout=0.5)
    model = build(folder, lora)
    randomize_adapters(model)
    token_ids = samples()[0].token_ids[None]

    def passes():
        with torch.no_grad():
            return [model(input_ids=token_ids).logits for _ in range(2)]

    training = passes()
    model.eval()
    evaluating = passes()
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("lora_dropout.default"):
                module.p = 0.0
    model.train()
    return training, evaluating, passes()


def test_dropout_acts_in_training_passes_only(run_ranks, folders):
    for training, evaluating, without in run_ranks(dropped, 2, folders["llama"]):
        assert not torch.equal(*training)
        assert torch.equal(*evaluating)
        assert torch.equal(evaluating[0], without[0])
