import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_folder, tiny_model

from shardwise.config import ModelError
from shardwise.engine import model_folder as module
from shardwise.engine.model_folder import INDEX_NAME, SINGLE_NAME, ModelFolder, resolve_folder


@pytest.fixture
def qwen(tmp_path):
    """A folder of its own for every test that breaks one."""
    return tiny_folder("qwen3", tmp_path / "qwen")


def test_tensors_of_one_file_and_of_many_are_read(tmp_path):
    model = tiny_model("llama")
    for limit in ("1GB", "8KB"):
        model.save_pretrained(tmp_path / limit, max_shard_size=limit)
        with ModelFolder(tmp_path / limit) as source:
            assert set(source.specs) == set(model.state_dict())
            for name, tensor in model.state_dict().items():
                assert source.specs[name].shape == tensor.shape
                assert torch.equal(source.read(name), tensor)
                assert name in load_file(source.file_of(name))
            rows = source.read("lm_head.weight", [slice(3, 5), slice(0, 30)])
            assert torch.equal(rows, model.lm_head.weight[3:5])
    assert len(list((tmp_path / "8KB").glob("*.safetensors"))) > 2


def test_files_without_an_index_are_all_read(tmp_path):
    save_file({"a": torch.tensor([1.0])}, tmp_path / "one.safetensors")
    save_file({"b": torch.tensor(2.0)}, tmp_path / "two.safetensors")
    with ModelFolder(tmp_path) as source:
        assert {name: source.read(name).tolist() for name in source.specs} == {"a": [1.0], "b": 2.0}


def truncate(folder):
    data = (folder / SINGLE_NAME).read_bytes()
    (folder / SINGLE_NAME).write_bytes(data[: len(data) // 2])


def index_of(tree):
    return lambda folder: (folder / INDEX_NAME).write_text(tree if isinstance(tree, str) else json.dumps(tree))


def index_of_a_tensor_that_its_file_lacks(folder):
    names = dict.fromkeys(load_file(folder / SINGLE_NAME), SINGLE_NAME)
    save_file({"another": torch.ones(1)}, folder / "other.safetensors")
    index_of({"weight_map": names | {"model.norm.weight": "other.safetensors"}})(folder)


OTHER_FILE = {"weight_map": {"model.norm.weight": "../elsewhere/model.safetensors"}}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"/model.safetensors cannot be read as a safetensors file: its tensors end at byte \d+, and the fi"),
        (index_of("{"), ": model.safetensors.index.json cannot be used: Expecting property name"),
        (index_of([]), ": .* it has no weight_map from tensor names to files"),
        (index_of({"metadata": {}}), ": .* it has no weight_map"),
        (index_of({"weight_map": ["model.norm.weight"]}), ": .* it has no weight_map"),
        (
            index_of({"weight_map": {"n": "gone.safetensors"}}),
            ": .* it puts n into gone.safetensors, which does not exi",
        ),
        (index_of({"weight_map": {"n": 3}}), ": .* it puts n into 3, which is not the name of a file beside it"),
        (
            index_of(OTHER_FILE),
            ": .* it puts model.norm.weight into '../elsewhere/model.safetensors', which is not the",
        ),
        (
            index_of_a_tensor_that_its_file_lacks,
            ": model.safetensors.index.json puts model.norm.weight into other.safetensors, which does not hold it",
        ),
    ],
)
def test_damaged_files_are_named_with_the_fix(qwen, damage, message):
    shutil.copytree(qwen, qwen.parent / "elsewhere")
    damage(qwen)
    with pytest.raises(ModelError, match=f"^{qwen}{message}") as error:
        ModelFolder(qwen)
    assert "; download or copy " in str(error.value)


def test_resolve_folder_finds_a_local_folder(qwen):
    assert resolve_folder(str(qwen)) == qwen


def without_config(folder):
    (folder / "config.json").unlink()


def without_weights(folder):
    (folder / SINGLE_NAME).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_config, r"^model\.path=.*qwen: .*config\.json does not exist; a model folder needs one$"),
        (
            without_weights,
            r"^model\.path=.*qwen has a config\.json but no \*\.safetensors weights; save the model with",
        ),
    ],
)
def test_folder_without_a_part_is_refused(qwen, damage, message):
    damage(qwen)
    with pytest.raises(ModelError, match=message):
        resolve_folder(str(qwen))


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "~/nowhere", "a/b/c"])
def test_unknown_path_is_refused_without_asking_the_hub(monkeypatch, path):
    monkeypatch.setattr(module, "snapshot_download", lambda *_a, **_k: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match=r"is not a folder; give a Hugging Face model folder or a hub name$"):
        resolve_folder(path)


def test_unknown_hub_name_is_refused(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("nobody/nothing-at-all", "not a valid name"):
        with pytest.raises(
            ModelError, match=rf"^model\.path={name} is neither a local folder nor a model that the hub"
        ):
            resolve_folder(name)
