import pytest
from tiny_models import tiny_folder, tiny_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwise.config import LoraConfig
from shardwise.engine.lora import inject_lora
from shardwise.engine.model import build_on_meta
from shardwise.engine.runtime_state import buffer_names, has_adapters, merged_state, runtime_state


@pytest.fixture
def adapted(tmp_path):
    model = build_on_meta(tiny_folder("llama", tmp_path))
    inject_lora(model, LoraConfig(rank=2, modules_to_save=["lm_head"]))
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    return model


def test_a_plain_model_has_the_names_and_tensors_of_its_state_dict():
    model = tiny_model("qwen3")
    assert not has_adapters(model)
    state = model.state_dict()
    for found in (runtime_state(model), merged_state(model)):
        assert list(found) == list(state)
        assert all(found[name].data_ptr() == tensor.data_ptr() for name, tensor in state.items())


def test_adapters_and_wrappers_leave_no_trace_in_names_and_shapes(adapted):
    assert has_adapters(adapted)
    plain = {name: tensor.shape for name, tensor in tiny_model("llama").state_dict().items()}
    assert {name: tensor.shape for name, tensor in runtime_state(adapted).items()} == plain
    assert sorted(merged_state(adapted)) == sorted(plain)


def test_buffers_are_named_without_wrappers():
    model = tiny_model("llama")
    plain = buffer_names(model)
    assert plain == {name for name, _ in model.named_buffers()}
    model.model.rotary_emb = checkpoint_wrapper(model.model.rotary_emb)
    assert buffer_names(model) == plain
