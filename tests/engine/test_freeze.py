from pathlib import Path

import pytest
import torch
from family_table import FAMILIES, save_model
from tiny_models import tiny_folder
from vision_samples import negative_logprob

from shardwise.config import ConfigError, EngineConfig, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.engine.freeze import freeze, require_routers
from shardwise.engine.model import build_on_meta
from shardwise.families import routers_of
from shardwise.types import Sample


@pytest.fixture
def model(tmp_path):
    return build_on_meta(tiny_folder("llama", tmp_path))


@pytest.mark.parametrize(
    ("prefixes", "frozen"),
    [
        ([], []),
        (["model.embed_tokens"], ["model.embed_tokens.weight"]),
        (["model.layers.0.mlp", "lm_head"], [f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")]),
        (
            ["model.layers.1.self_attn.q_proj.", "model.norm"],
            ["model.layers.1.self_attn.q_proj.weight", "model.norm.weight"],
        ),
    ],
)
def test_parameters_that_begin_so_are_frozen_and_no_others(model, prefixes, frozen):
    freeze(model, prefixes)
    expected = frozen + (["lm_head.weight"] if "lm_head" in prefixes else [])
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == expected


@pytest.mark.parametrize("prefix", ["model.embeddings", "layers.0", "model.visual", "Model.layers", "model.l", ""])
def test_trap_10_a_prefix_that_matches_nothing_is_refused(model, prefix):
    with pytest.raises(ConfigError) as error:
        freeze(model, ["model.norm", prefix])
    assert str(error.value).startswith(
        f"engine.freeze_module_prefix: {prefix!r} names no module or parameter of LlamaForCausalLM; its modules have "
        "names such as "
    )


@pytest.mark.parametrize("prefix", ["lm_head", "lm_head.weight"])
def test_a_tied_projection_is_frozen_by_the_name_of_its_weight(tmp_path, prefix):
    model = build_on_meta(tiny_folder("qwen3", tmp_path))
    with pytest.raises(ConfigError) as error:
        freeze(model, [prefix])
    assert str(error.value) == (
        f"engine.freeze_module_prefix: {prefix} has no weight of its own, it is model.embed_tokens.weight; name that"
    )
    freeze(model, ["model.embed_tokens.weight"])
    assert not model.lm_head.weight.requires_grad


@pytest.mark.parametrize("prefixes", [["model", "lm_head"], ["model.", "lm_head.weight"]])
def test_freezing_everything_is_refused(model, prefixes):
    with pytest.raises(ConfigError) as error:
        freeze(model, prefixes)
    assert str(error.value) == (
        f"engine.freeze_module_prefix={prefixes} freezes the whole model; nothing would be trained"
    )


def test_routers_are_frozen_beside_what_prefixes_name_and_no_others(tmp_path):
    model = build_on_meta(tiny_folder("mixtral", tmp_path))
    freeze(model, ["model.norm"], routers=True)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == [*(f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)), "model.norm.weight"]


def test_a_dense_model_has_no_routers_and_says_which_others_have(tmp_path):
    model = build_on_meta(tiny_folder("qwen3", tmp_path))
    assert routers_of(model) == []
    with pytest.raises(ConfigError) as error:
        require_routers(model, "engine.freeze_router=true")
    assert str(error.value) == (
        "engine.freeze_router=true has no effect on Qwen3ForCausalLM, which has no router: neither a module that "
        "transformers records router_logits of (such as Qwen3MoeTopKRouter, MixtralTopKRouter, DeepseekV3TopkRouter) "
        "nor one called gate or router beside one called experts; remove it"
    )


def trained_tower(folder: str) -> dict[str, bool]:
    """On a rank: which weights a step with decay, on words, has changed."""
    keys = EngineConfig(allow_unproven=True)
    optimizer = OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
    engine = TrainEngine.build(Path(folder), keys, device=torch.device("cpu"), optimizer=optimizer)
    before = {name: tensor.clone() for name, tensor in engine.named_weights(torch.float32)}
    tokens = torch.arange(3, 13)
    sample = Sample(uid="0", token_ids=tokens, loss_mask=torch.arange(10) > 0)
    step = pack([sample], num_shards=1, max_tokens=16)
    engine.forward_backward(step.shards[0], negative_logprob, step.denominators)
    engine.optim_step()
    return {name: not torch.equal(tensor, before[name]) for name, tensor in engine.named_weights(torch.float32)}


def test_what_no_gradient_reaches_beside_a_language_model_does_not_decay(run_ranks, tmp_path):
    save_model("ovis2", FAMILIES["ovis2"], tmp_path)
    (changed,) = run_ranks(trained_tower, 1, str(tmp_path))
    beside = {name: is_changed for name, is_changed in changed.items() if "language_model" not in name}
    assert len(beside) > 10
    assert not any(beside.values()), beside
    assert all(is_changed for name, is_changed in changed.items() if "language_model" in name)
