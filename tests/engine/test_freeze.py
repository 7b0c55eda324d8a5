import pytest
from tiny_models import tiny_folder

from shardwise.config import ConfigError
from shardwise.engine.freeze import freeze, require_routers
from shardwise.engine.model import build_on_meta
from shardwise.families import routers_of


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
