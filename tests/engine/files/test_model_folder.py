import json
import shutil

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tiny_models import tiny_folder, tiny_model
from transformers import AutoModelForCausalLM

from shardwise.config import ModelError
from shardwise.engine.files import model_folder as module
from shardwise.engine.files.model_folder import INDEX_NAME, SINGLE_NAME, ModelFolder, resolve_folder


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
            rows = source.read("lm_head.weight", [slice(3, 5), slice(0, 30)])
            assert torch.equal(rows, model.lm_head.weight[3:5])
    assert len(list((tmp_path / "8KB").glob("*.safetensors"))) > 2


def test_files_of_other_names_without_an_index_are_all_read(tmp_path):
    save_file({"a": torch.tensor([1.0])}, tmp_path / "one.safetensors")
    save_file({"b": torch.tensor(2.0)}, tmp_path / "two.safetensors")
    with ModelFolder(tmp_path) as source:
        assert {name: source.read(name).tolist() for name in source.specs} == {"a": [1.0], "b": 2.0}


def test_only_the_files_of_the_model_are_read(tmp_path):
    """An adapter, or the weights in another form, may lie beside them."""
    save_file({"layers.0.wq": torch.tensor(9.0)}, tmp_path / "consolidated.safetensors")
    save_file({"a": torch.tensor(9.0)}, tmp_path / "model_old.safetensors")
    save_file({"a": torch.tensor(2.0), "b": torch.tensor(9.0)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.tensor(3.0)}, tmp_path / "model-2.safetensors")
    index_of({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})(tmp_path)
    with ModelFolder(tmp_path) as source:
        assert {name: source.read(name).item() for name in source.specs} == {"a": 2.0, "b": 3.0}
    save_file({"a": torch.tensor(1.0)}, tmp_path / SINGLE_NAME)
    with ModelFolder(tmp_path) as source:
        assert {name: source.read(name).item() for name in source.specs} == {"a": 1.0}


def test_of_a_single_file_and_shards_the_one_is_read_that_transformers_reads(qwen):
    other = tiny_model("qwen3", seed=1)
    other.save_pretrained(qwen / "shards", max_shard_size="8KB")
    for path in (qwen / "shards").glob("model*"):
        shutil.copy(path, qwen)
    expected = AutoModelForCausalLM.from_pretrained(qwen).state_dict()
    with ModelFolder(qwen) as source:
        for name in source.specs:
            assert torch.equal(source.read(name), expected[name])
    name = "model.embed_tokens.weight"
    assert not torch.equal(expected[name], other.state_dict()[name])


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for number, file in enumerate(["weights.safetensors", "weights_old.safetensors"]):
        save_file({"a": torch.tensor(number)}, tmp_path / file)
    with pytest.raises(
        ModelError,
        match=rf"^{tmp_path}: a is in weights\.safetensors and in weights_old\.safetensors, and without "
        r"model\.safetensors\.index\.json nothing says which one counts; move the file that is not the model else",
    ):
        ModelFolder(tmp_path)


def truncate(folder):
    data = (folder / SINGLE_NAME).read_bytes()
    (folder / SINGLE_NAME).write_bytes(data[: len(data) // 2])


def index_of(tree):
    return lambda folder: (folder / INDEX_NAME).write_text(tree if isinstance(tree, str) else json.dumps(tree))


def damaged_index(tree):
    def damage(folder):
        (folder / SINGLE_NAME).rename(folder / "model-1.safetensors")
        index_of(tree)(folder)

    return damage


def index_of_a_tensor_that_its_file_lacks(folder):
    (folder / SINGLE_NAME).rename(folder / "model-1.safetensors")
    names = dict.fromkeys(load_file(folder / "model-1.safetensors"), "model-1.safetensors")
    save_file({"another": torch.ones(1)}, folder / "other.safetensors")
    index_of({"weight_map": names | {"model.norm.weight": "other.safetensors"}})(folder)


OTHER_FILE = {"weight_map": {"model.norm.weight": "../elsewhere/model.safetensors"}}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"/model.safetensors cannot be read as a safetensors file: its tensors end at byte \d+, and the fi"),
        (damaged_index("{"), ": model.safetensors.index.json cannot be used: Expecting property name"),
        (damaged_index("[" * 100_000), ": model.safetensors.index.json cannot be used: maximum recursion depth"),
        (
            damaged_index({"weight_map": {"n": f"{'x' * 256}.safetensors"}}),
            ": .* it puts n into 'x+.safetensors', which is not the name of a file beside it",
        ),
        (damaged_index([]), ": .* it has no weight_map from tensor names to files"),
        (damaged_index({"metadata": {}}), ": .* it has no weight_map"),
        (damaged_index({"weight_map": ["model.norm.weight"]}), ": .* it has no weight_map"),
        (
            damaged_index({"weight_map": {"n": "gone.safetensors"}}),
            ": .* it puts n into gone.safetensors, which does not exi",
        ),
        (damaged_index({"weight_map": {"n": 3}}), ": .* it puts n into 3, which is not the name of a file beside it"),
        (
            damaged_index(OTHER_FILE),
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


def test_resolve_folder_names_a_damaged_index(qwen):
    damaged_index({"weight_map": 3})(qwen)
    with pytest.raises(ModelError, match=f"^{qwen}: {INDEX_NAME} cannot be used: it has no weight_map"):
        resolve_folder(str(qwen))


def test_resolve_folder_finds_a_local_folder(qwen):
    assert resolve_folder(str(qwen)) == qwen


def without_config(folder):
    (folder / "config.json").unlink()


def without_weights(folder):
    (folder / SINGLE_NAME).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_config, r"^/.*qwen: .*config\.json does not exist; a model folder needs one$"),
        (
            without_weights,
            r"^/.*qwen has a config\.json but no \*\.safetensors weights; save the model with",
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
        with pytest.raises(ModelError, match=rf"^{name} is neither a local folder nor a model that the hub"):
            resolve_folder(name)


ONE = {"config.json", "model.safetensors", "adapter_model.safetensors", "consolidated.safetensors", "pytorch_model.bin"}
SHARDS = {"config.json", INDEX_NAME, "model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"}
OTHER_NAMES = {"config.json", "tokenizer.model", "part_a.safetensors", "part_b.safetensors", "optimizer.pt"}


@pytest.mark.parametrize(
    ("held", "fetched"),
    [
        (ONE, {"config.json", "model.safetensors"}),
        (SHARDS, SHARDS - {"consolidated.safetensors"}),
        (OTHER_NAMES, OTHER_NAMES - {"optimizer.pt"}),
    ],
)
def test_of_a_hub_model_what_is_read_is_fetched_from_one_commit(tmp_path, monkeypatch, held, fetched):
    hub = tmp_path / "hub"
    hub.mkdir()
    for name in held:
        (hub / name).write_text("")
    index_of({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})(hub)
    revisions = []

    def download(name, *, revision, allow_patterns, local_files_only):
        assert (name, local_files_only) == ("someone/model", False)
        revisions.append(revision)
        snapshot = tmp_path / "snapshots" / "c0ffee"
        snapshot.mkdir(parents=True, exist_ok=True)
        for file in filter_repo_objects(held, allow_patterns=allow_patterns):
            shutil.copyfile(hub / file, snapshot / file)
        return str(snapshot)

    monkeypatch.setattr(module, "snapshot_download", download)
    folder = resolve_folder("someone/model")
    assert {path.name for path in folder.iterdir()} == fetched
    assert (revisions[0], {*revisions[1:]}) == (None, {"c0ffee"})
