import pytest
import torch
from family_table import COMMON, FAMILIES, random_model
from tiny_models import tiny_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.config import ConfigError, LoraConfig, OptimizerConfig
from shardwise.engine.lora import inject_lora
from shardwise.engine.optim.parameter_groups import group_parameters, trained_parameters
from shardwise.ops import plain_name


def wrapped(family):
    """A model with its layers in activation-checkpointing wrappers."""
    model = tiny_model(family)
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer)
    return model


def test_names_are_free_of_wrappers():
    names = [name for name, _ in wrapped("llama").named_parameters()]
    assert "model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight" in names
    assert [plain_name(name) for name in names] == [name for name, _ in tiny_model("llama").named_parameters()]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_only_matrices_outside_the_embedding_are_decayed(family):
    """A tied output projection is the embedding and is not decayed; an untied one is a matrix like others."""
    trained = trained_parameters(wrapped(family))
    decayed = [one.name for one in trained if one.is_decayed]
    kept = [one.name for one in trained if not one.is_decayed]
    assert sorted(decayed + kept) == sorted(name for name, _ in tiny_model(family).named_parameters())
    assert {name.split(".")[-2] for name in kept} >= {"embed_tokens", "norm", "input_layernorm"}
    assert all("norm" in name or "embed_tokens" in name for name in kept)
    assert ("lm_head.weight" in decayed) == (family == "llama")
    groups = group_parameters(trained, OptimizerConfig(weight_decay=0.1))
    assert {group.weight_decay: len(group.parameters) for group in groups} == {0.0: len(kept), 0.1: len(decayed)}


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_muon_takes_the_matrices_of_the_layers_alone(family):
    matrices = {one.name for one in trained_parameters(wrapped(family)) if one.is_hidden_matrix}
    kinds = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    kinds += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert matrices == {f"model.layers.{layer}.{kind}.weight" for layer in (0, 1) for kind in kinds}


OTHER_MATRICES = {
    *("gate_up_proj", "up_proj", "down_proj"),  # of fused experts
    *("fn", "hc_fn", "mm_input_projection_weight"),
}
"""Names of parameters that are matrices, beside weights of layers."""


@pytest.mark.parametrize(
    "family",
    [
        name if name in ("kimi_linear", "aria", "internvl") else pytest.param(name, marks=pytest.mark.full)
        for name in FAMILIES
    ],
)
def test_of_every_family_only_matrices_are_decayed_or_for_muon(family):
    """A new family whose parameters have names that nobody knows is looked at here."""
    model = random_model(family, FAMILIES[family])
    owners = {id(p): (module, name) for module in model.modules() for name, p in module.named_parameters(recurse=False)}
    for one in trained_parameters(model):
        module, name = owners[id(one.parameter)]
        if one.is_decayed or one.is_hidden_matrix:
            assert name.endswith("weight") or name in OTHER_MATRICES, one.name
            assert "embed" not in type(module).__name__.lower(), one.name


def test_biases_of_fused_experts_are_neither_decayed_nor_matrices():
    """GPT-OSS has one of [experts, columns] for each of its two products."""
    model = nn.ModuleDict({"experts": nn.Linear(3, 3)})
    model["experts"].gate_up_proj_bias = nn.Parameter(torch.zeros(4, 6))
    trained = {one.name: one for one in trained_parameters(model)}
    assert not trained["experts.gate_up_proj_bias"].is_decayed
    assert not trained["experts.gate_up_proj_bias"].is_hidden_matrix
    assert trained["experts.weight"].is_decayed


def test_norms_with_a_row_for_each_head_are_neither_decayed_nor_matrices():
    """Cohere's with use_qk_norm."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("cohere", **COMMON | FAMILIES["cohere"]))
    trained = trained_parameters(model)
    norms = {one.name: one for one in trained if "norm" in one.name}
    assert norms["model.layers.0.self_attn.q_norm.weight"].parameter.dim() == 2
    assert not any(one.is_decayed or one.is_hidden_matrix for one in norms.values())


def test_muon_leaves_adapters_of_fused_experts():
    """Orthogonalised as one matrix, an expert's update would depend on the gradients of the others."""
    model = tiny_model("qwen3_moe")
    inject_lora(model, LoraConfig(target_modules=["q_proj"], target_parameters=["gate_up_proj", "down_proj"]))
    trained = trained_parameters(model)
    matrices = {one.name for one in trained if one.is_hidden_matrix}
    layers = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    assert matrices == {f"{layer}.lora_{part}.default.weight" for layer in layers for part in "AB"}
    assert sum(one.is_decayed for one in trained) == len(trained) == 2 * 3 * 2, "A and B of three in each of two layers"


@pytest.mark.parametrize("head", ["score", "embed_out", "lm_head"])
def test_muon_leaves_heads_and_their_adapters_and_fused_experts(head):
    model = nn.ModuleDict({"up": nn.Linear(3, 3), head: nn.ModuleDict({"lora_A": nn.Linear(3, 2, bias=False)})})
    model["up"].experts = nn.Parameter(torch.zeros(2, 3, 3))
    model["up"].lora_B = nn.Linear(2, 3, bias=False)
    matrices = {one.name for one in trained_parameters(model) if one.is_hidden_matrix}
    assert matrices == {"up.weight", "up.lora_B.weight"}
    assert {one.name for one in trained_parameters(model) if one.is_decayed} == {
        "up.weight", "up.experts", "up.lora_B.weight", f"{head}.lora_A.weight"
    }  # fmt: skip


def test_frozen_parameters_are_not_trained():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert [one.name for one in trained_parameters(model)] == ["1.weight", "1.bias"]
    with pytest.raises(ConfigError, match="nothing to train: no parameter requires a gradient"):
        trained_parameters(model.requires_grad_(False))


def test_longest_prefix_gives_the_learning_rate():
    rates = {"model.layers.1": 1e-3, "model.layers.1.mlp": 2e-3, "model.embed_tokens.weight": 0.0}
    config = OptimizerConfig(learning_rate=5e-4, weight_decay=0.1, module_learning_rates=rates)
    trained = trained_parameters(wrapped("llama"), rates)
    by_name = {one.name: one.rate_prefix for one in trained}
    assert by_name["model.layers.0.mlp.up_proj.weight"] is None
    assert by_name["model.layers.1.self_attn.q_proj.weight"] == "model.layers.1"
    assert by_name["model.layers.1.mlp.up_proj.weight"] == "model.layers.1.mlp"
    assert by_name["model.embed_tokens.weight"] == "model.embed_tokens.weight"
    groups = group_parameters(trained, config)
    assert {(g.rate_prefix, g.peak_learning_rate, g.weight_decay) for g in groups} == {
        (None, 5e-4, 0.1), (None, 5e-4, 0.0),
        ("model.layers.1", 1e-3, 0.1), ("model.layers.1", 1e-3, 0.0),
        ("model.layers.1.mlp", 2e-3, 0.1), ("model.embed_tokens.weight", 0.0, 0.0),
    }  # fmt: skip


def test_a_prefix_ends_where_a_name_ends():
    """layers.1 is not layers.10."""
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(12)])})
    trained = trained_parameters(model, ["layers.1"])
    assert [one.name for one in trained if one.rate_prefix == "layers.1"] == ["layers.1.weight"]


def test_a_tied_projection_has_the_rate_of_its_weight():
    with pytest.raises(ConfigError) as error:
        trained_parameters(wrapped("qwen3"), ["lm_head"])
    assert str(error.value) == (
        "trainer.module_learning_rates.lm_head: lm_head has no weight of its own, it is model.embed_tokens.weight; "
        "name that"
    )


def test_prefix_without_a_parameter_names_the_nearest():
    with pytest.raises(ConfigError) as error:
        trained_parameters(wrapped("llama"), ["model.layer.1"])
    message = str(error.value)
    assert message.startswith(
        "trainer.module_learning_rates.model.layer.1: no trained parameter is named so or lies in a module of this "
        "name; the nearest names are model.layers.1, "
    )
    assert len(message.split(" are ")[1].split(", ")) == 5


def test_prefix_of_a_frozen_module_is_refused():
    model = wrapped("llama")
    model.model.embed_tokens.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"^trainer\.module_learning_rates\.model\.embed_tokens: no trained"):
        trained_parameters(model, ["model.embed_tokens"])


def test_prefix_that_longer_ones_take_everything_from_is_refused():
    with pytest.raises(ConfigError) as error:
        trained_parameters(nn.ModuleDict({"a": nn.Linear(1, 1)}), ["a", "a.weight", "a.bias"])
    assert str(error.value) == (
        "trainer.module_learning_rates.a has no effect: longer keys (a.bias, a.weight) take all of its parameters; "
        "remove it"
    )
