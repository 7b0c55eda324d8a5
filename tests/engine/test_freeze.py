import pytest
from tiny_models import tiny_folder

from shardwise.config import ConfigError
from shardwise.engine.freeze import freeze
from shardwise.engine.model import build_on_meta


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


@pytest.mark.parametrize("prefixes", [["model", "lm_head"], ["model.", "lm_head.weight"]])
def test_freezing_everything_is_refused(model, prefixes):
    with pytest.raises(ConfigError) as error:
        freeze(model, prefixes)
    assert str(error.value) == (
        f"engine.freeze_module_prefix={prefixes} freezes the whole model; nothing would be trained"
    )
