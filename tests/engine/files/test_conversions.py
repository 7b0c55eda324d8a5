"""Every rule of every family's conversion, against transformers doing the whole model at once."""

import pytest
import torch
from tiny_models import FAMILIES, MOE_FAMILIES, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    revert_weight_conversion,
)

from shardwise.engine.files.conversions import export_blocks, import_blocks

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ROUTED = {"n_routed_experts": 4, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
LOCAL = {"num_local_experts": 4}
NAMED = {"num_experts": 4, "moe_intermediate_size": 16}
MIXTURES = {
    "qwen2_moe": NAMED | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": NAMED,
    "mixtral": LOCAL,
    "phimoe": LOCAL,
    "olmoe": {"num_experts": 4},
    "flex_olmo": {"num_experts": 4},
    "deepseek_v2": ROUTED | MLA | {"n_group": 1, "topk_group": 1},
    "deepseek_v3": ROUTED | MLA | {"n_group": 1, "topk_group": 1},
    "glm4_moe": ROUTED | {"n_group": 1, "topk_group": 1},
    "dots1": ROUTED | {"n_group": 1, "topk_group": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "minimax_m2": LOCAL,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
}
STORED_FUSED = {"gpt_oss": LOCAL, "granitemoe": LOCAL, "jetmoe": LOCAL | {"kv_channels": 8}, "gpt_neox": {}}


def random_model(family):
    torch.manual_seed(0)
    options = (MIXTURES | STORED_FUSED)[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON | options), dtype=torch.float32)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.randn(tensor.shape))
    return model


def runtime_tensors(model):
    tied = set(model.get_expanded_tied_weights_keys())
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def exported(model):
    runtime = runtime_tensors(model)
    hub = {}
    for block in export_blocks(model, model.state_dict(), torch.float32):
        pairs = list(block.convert([runtime[name] for name in block.runtime_names]))
        converted = dict(pairs)
        assert len(pairs) == len(converted)
        assert {n: (t.shape, t.dtype) for n, t in pairs} == {
            n: (t.shape, t.dtype) for n, t in block.hub_tensors.items()
        }
        hub |= {name: converted[name] for name in block.hub_tensors}
    return hub


def assert_equal(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", MIXTURES | STORED_FUSED)
def test_family_is_exported_as_transformers_does_and_comes_back(family):
    model = random_model(family)
    runtime = runtime_tensors(model)
    hub = exported(model)
    assert_equal(hub, revert_weight_conversion(model, dict(runtime)))
    blocks, unused = import_blocks(model, model.state_dict(), hub)
    assert unused == {}
    assert any(block.merges_rows for block in blocks) == (family in MIXTURES)
    back = {}
    for block in blocks:
        back |= block.convert({name: hub[name] for name in block.stored_names()})
    assert_equal(dict(sorted(back.items())), dict(sorted(runtime.items())))


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_rows_of_a_fused_parameter_are_made_of_the_same_rows_of_its_sources(family):
    model = tiny_model(family)
    hub = exported(model)
    merging = [block for block in import_blocks(model, model.state_dict(), hub)[0] if block.merges_rows]
    assert len(merging) == 4  # two parameters of two layers
    for block in merging:
        for rows in (slice(0, 6), slice(2, 5), slice(5, 6)):
            tensors = {name: hub[name] for name in block.stored_names(rows)}
            assert len(tensors) == len(block.sources) * (rows.stop - rows.start)
            found = block.convert(tensors)[block.first_target]
            assert torch.equal(found, model.get_parameter(block.first_target)[rows])
            assert tensors == {}, "the sources are let go while they are joined"


def test_parts_of_a_fused_parameter_are_views_of_one_storage_as_save_pretrained_sees_them():
    """Its rule for splitting files keeps tensors of one storage together."""
    model = tiny_model("qwen3_moe")
    (experts,) = [
        block
        for block in export_blocks(model, model.state_dict(), torch.float32)
        if block.runtime_names == ("model.layers.1.mlp.experts.gate_up_proj",)
    ]
    storages = [tensor.untyped_storage()._cdata for tensor in experts.hub_tensors.values()]
    assert [storages.index(storage) for storage in storages] == [0] * 6 + [6] * 6


@pytest.fixture
def llama_of_other_files():
    """A llama whose checkpoints join q, k and v, split the embedding by columns, and transpose the head."""
    model = tiny_model("llama", num_key_value_heads=3)

    class LlamaStoredOtherwise(type(model)):
        pass

    model.__class__ = LlamaStoredOtherwise
    register_checkpoint_conversion_mapping(
        "LlamaStoredOtherwise",
        [
            WeightConverter(
                "self_attn.qkv.weight",
                ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
                [Chunk(dim=0)],
            ),
            WeightConverter(["embed.left", "embed.right"], "embed_tokens.weight", [Concatenate(dim=1)]),
            WeightConverter("^head", "lm_head.weight", [Transpose(0, 1)]),
        ],
        overwrite=True,
    )
    return model


def test_rules_that_join_split_and_transpose_go_both_ways(llama_of_other_files):
    model = llama_of_other_files
    runtime = runtime_tensors(model)
    hub = exported(model)
    attention = [runtime[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(hub["model.layers.0.self_attn.qkv.weight"], torch.cat(attention))
    assert torch.equal(hub["head"], model.lm_head.weight.t())
    assert torch.equal(hub["model.embed.right"], model.model.embed_tokens.weight[:, 15:])
    blocks, unused = import_blocks(model, model.state_dict(), hub)
    assert unused == {}
    assert not any(block.merges_rows for block in blocks)
    back = {}
    for block in blocks:
        back |= block.convert({name: hub[name] for name in block.stored_names()})
    assert_equal(dict(sorted(back.items())), dict(sorted(runtime.items())))


def test_only_rules_that_leave_dim_0_alone_after_the_merge_merge_rows(llama_of_other_files):
    model = llama_of_other_files
    rules = {
        (MergeModulelist(0),): True,
        (MergeModulelist(0), Concatenate(1)): True,
        (MergeModulelist(0), Transpose(1, 2)): True,
        (MergeModulelist(0), Transpose(1, 2, check_dims=True)): False,  # looks at the whole parameter's shape
        (MergeModulelist(0), Transpose(0, 1)): False,
        (MergeModulelist(0), Concatenate(0)): False,
        (MergeModulelist(1),): False,
        (Concatenate(1),): False,
    }
    for operations, expected in rules.items():
        rule = WeightConverter("head.*.w", "lm_head.weight", list(operations))
        register_checkpoint_conversion_mapping("LlamaStoredOtherwise", [rule], overwrite=True)
        (block,), _ = import_blocks(model, model.state_dict(), ["head.0.w", "head.10.w", "head.2.w"])
        assert block.merges_rows == expected, operations
        assert block.stored_names() == ["head.0.w", "head.2.w", "head.10.w"]


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_families_keep_their_names(family):
    model = tiny_model(family)
    assert_equal(exported(model), runtime_tensors(model))
