import json
import re

import pytest
import torch
from family_table import FAMILIES, save_model
from tiny_models import tiny_folder
from transformers import AutoModelForCausalLM

from shardwise.config import ModelError
from shardwise.model_config import read_generation_config
from shardwise.rollout.skeleton import load_skeleton, served_by


def test_a_skeleton_keeps_in_float32_what_from_pretrained_keeps_so(tmp_path):
    """In float16 more than in bfloat16."""
    for family in ("gpt_oss", "lfm2_moe"):
        save_model(family, FAMILIES[family], tmp_path / family)
        for dtype in (torch.float16, torch.bfloat16):
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=dtype).state_dict()
            served = {name: tensor.dtype for name, tensor in served_by(load_skeleton(tmp_path / family, dtype))}
            assert served == {name: loaded[name].dtype for name in served}
            assert (torch.float32 in served.values()) == (family == "lfm2_moe" or dtype == torch.float16)


@pytest.mark.parametrize(("family", "tied"), [("qwen3", {"lm_head.weight"}), ("llama", set())])
def test_a_skeleton_has_the_names_shapes_and_dtypes_of_the_model_and_no_values(model_folders, family, tied):
    model = AutoModelForCausalLM.from_pretrained(model_folders[family], dtype=torch.bfloat16)
    skeleton = load_skeleton(model_folders[family], torch.bfloat16)
    expected = {name: (t.shape, t.dtype) for name, t in model.state_dict().items() if name not in tied}
    served = dict(served_by(skeleton))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in served.items()} == expected
    assert all(tensor.is_meta for tensor in served.values())
    assert skeleton.generation_config.eos_token_id == model.generation_config.eos_token_id


@pytest.mark.parametrize(
    ("name", "written", "told"),
    [
        ("config.json", {"hidden_act": "swoosh"}, "generation; look into its config.json. hidden_act=swoosh is"),
        ("generation_config.json", {"max_new_tokens": -3}, "generation_config.json cannot be read; correct it: ValueE"),
        ("generation_config.json", {"watermarking_config": 3}, "generation_config.json cannot be read; correct it: At"),
    ],
)
def test_a_value_that_transformers_cannot_use_is_an_error_of_its_file(tmp_path, name, written, told):
    file = tiny_folder("qwen3", tmp_path) / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | written))
    with pytest.raises(ModelError, match=re.escape(told)):
        load_skeleton(tmp_path, torch.float32)


def test_a_generation_config_that_could_not_be_saved_again_is_read(tmp_path):
    file = tiny_folder("qwen3", tmp_path) / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "eos_token_id": 3}))
    assert load_skeleton(tmp_path, torch.float32).generation_config.eos_token_id == 3
    with pytest.raises(ModelError, match="not be saved again as it is"):
        read_generation_config(tmp_path)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelError, match=f"{tmp_path}/config.json does not exist; a model folder needs one"):
        load_skeleton(tmp_path, torch.float32)
