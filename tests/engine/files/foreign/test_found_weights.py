import pytest
import torch
from foreign_checkpoints import in_halves
from tiny_models import tiny_folder, tiny_model

from shardwise.config import ConfigError, ModelError
from shardwise.engine.files.foreign.found_weights import find_weights
from shardwise.engine.files.importing import RuntimeWeights
from shardwise.engine.files.rewrite_folder import on_meta


@pytest.fixture
def llama(tmp_path):
    folder = tiny_folder("llama", tmp_path / "source")
    return on_meta(folder, torch.float32), tiny_model("llama").state_dict()


def test_the_model_is_found_under_its_prefix_beside_other_states(llama):
    model, tensors = llama
    moments = {f"app.optim.state.{name}.exp_avg": tensor for name, tensor in tensors.items()}
    found = find_weights(in_halves({f"app.model.{name}": value for name, value in tensors.items()} | moments), model)
    assert found.prefix == "app.model."
    assert found.weights.specs.keys() == tensors.keys()
    assert found.left_out == list(moments)
    moments = {name.removeprefix("app."): value for name, value in moments.items()}
    plain = find_weights(in_halves(moments | tensors), model)
    assert (plain.prefix, plain.weights.specs.keys(), plain.left_out) == ("", tensors.keys(), list(moments))


def test_a_model_saved_without_its_head_module_is_found(llama):
    """The backbone's own state dict; the projection stands under another name and is missing."""
    model, tensors = llama
    backbone = {f"net.{name.removeprefix('model.')}": value for name, value in tensors.items() if "model." in name}
    found = find_weights(in_halves(backbone), model)
    assert (found.prefix, len(found.weights.tensors)) == ("net.", len(tensors) - 1)
    with pytest.raises(ModelError, match=r"1 tensor is missing \(lm_head\.weight\)\. Take"):
        RuntimeWeights(model, found.weights)


def test_a_given_prefix_decides_between_two_models_and_has_to_be_there(llama):
    model, tensors = llama
    two = in_halves({f"{part}.{name}": value for part in ("old", "new") for name, value in tensors.items()})
    with pytest.raises(ConfigError, match=r"holds 2 models that fit config\.json, under 'new\.', 'old\.'; choose"):
        find_weights(two, model)
    found = find_weights(two, model, prefix="new.")
    assert (found.weights.specs.keys(), len(found.left_out)) == (tensors.keys(), len(tensors))
    with pytest.raises(
        ConfigError, match=r"source holds no tensor under the prefix 'x\.'; its names are such as old\.mo"
    ):
        find_weights(two, model, prefix="x.")
