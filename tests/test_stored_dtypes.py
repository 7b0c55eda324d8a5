import pytest
import torch
from family_table import FAMILIES, save_model
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from shardwise.engine.model import build_on_meta
from shardwise.stored_dtypes import stored_dtypes


def tensors_of(model):
    tied = set(model.get_expanded_tied_weights_keys())
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def test_stored_dtypes_are_those_of_from_pretrained(tmp_path):
    model = save_model("deepseek_v3", FAMILIES["deepseek_v3"], tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert stored_dtypes(model, model.state_dict(), dtype) == {
            name: tensor.dtype for name, tensor in tensors_of(loaded).items()
        }
    assert (
        stored_dtypes(model, model.state_dict(), torch.bfloat16)["model.layers.1.mlp.gate.e_score_correction_bias"]
        == torch.float32
    )
    tied = tiny_model("qwen3")
    assert "lm_head.weight" not in stored_dtypes(tied, tied.state_dict(), torch.float32)


@pytest.mark.parametrize(
    ("family", "kept"),
    {
        "lfm2_moe": ["model.layers.1.feed_forward.expert_bias"],
        "hunyuan_v1_moe": ["model.layers.0.mlp.gate.wg.weight", "model.layers.1.mlp.gate.wg.weight"],
        "olmo_hybrid": ["model.layers.0.linear_attn.A_log"],
    }.items(),
)
def test_what_a_class_builds_in_float32_is_stored_so_though_the_class_does_not_say_it(tmp_path, family, kept):
    """Rounded, the bias of a router would send tokens to other experts than in training."""
    save_model(family, FAMILIES[family], tmp_path)
    model = build_on_meta(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loaded = tensors_of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))
        stored = stored_dtypes(model, model.state_dict(), dtype)
        assert stored == {name: tensor.dtype for name, tensor in loaded.items()}
        if dtype != torch.float32:
            assert [name for name, found in stored.items() if found == torch.float32] == kept
