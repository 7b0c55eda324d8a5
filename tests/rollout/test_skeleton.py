import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwise.config import ModelError
from shardwise.rollout.skeleton import load_skeleton, served_by


@pytest.mark.parametrize(("family", "tied"), [("qwen3", {"lm_head.weight"}), ("llama", set())])
def test_a_skeleton_has_the_names_shapes_and_dtypes_of_the_model_and_no_values(model_folders, family, tied):
    model = AutoModelForCausalLM.from_pretrained(model_folders[family], dtype=torch.bfloat16)
    skeleton = load_skeleton(model_folders[family], torch.bfloat16)
    expected = {name: (t.shape, t.dtype) for name, t in model.state_dict().items() if name not in tied}
    served = dict(served_by(skeleton))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in served.items()} == expected
    assert all(tensor.is_meta for tensor in served.values())
    assert skeleton.generation_config.eos_token_id == model.generation_config.eos_token_id


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelError, match=f"{tmp_path}/config.json does not exist; a model folder needs one"):
        load_skeleton(tmp_path, torch.float32)
