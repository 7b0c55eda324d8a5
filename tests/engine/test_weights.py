import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, random_samples, tiny_folder, tiny_model

from shardwise.config import EngineConfig, ModelError, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.data.synthetic import train_tokenizer
from shardwise.engine import TrainEngine, resolve_folder
from shardwise.engine import weights as module
from shardwise.engine.model import build_on_meta, initialize_buffers
from shardwise.engine.weights import INDEX_NAME, SINGLE_NAME, SafetensorsFolder, load_weights
from shardwise.recipes.losses import sft_loss

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return tiny_folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def qwen(tmp_path):
    """A folder of its own for every test that breaks one."""
    return tiny_folder("qwen3", tmp_path / "qwen")


def load_whole(folder):
    """Loads without a process group: weights of a whole model, and the bytes read."""
    model = build_on_meta(folder, torch.float32)
    model.to_empty(device="cpu")
    model.tie_weights()  # without sharding, to_empty gives the tied projection memory of its own
    initialize_buffers(model)
    num_bytes = load_weights(model, folder)
    return model, num_bytes


def load_sharded(folder, engine_config, dtype_name):
    engine = TrainEngine.build(Path(folder), EngineConfig(**engine_config), device=CPU, optimizer=OptimizerConfig())
    names = [name for name, _ in engine.named_weights(torch.float32)]
    weights = {name: tensor.clone() for name, tensor in engine.named_weights(getattr(torch, dtype_name))}
    return engine.num_bytes_read, names, weights


@pytest.mark.parametrize(
    ("world_size", "engine_config", "copies"), [(1, {}, 1), (2, {}, 1), (4, {}, 1), (4, {"fsdp_size": 2}, 2)]
)
def test_every_rank_reads_its_own_slices_and_they_make_up_the_file(
    run_ranks, folder, world_size, engine_config, copies
):
    """Trap 12: the tied projection is neither read nor sent twice."""
    stored = load_file(folder / SINGLE_NAME)
    file_bytes = sum(tensor.nbytes for tensor in stored.values())
    results = run_ranks(load_sharded, world_size, str(folder), engine_config, "float32")
    assert sum(num_bytes for num_bytes, _, _ in results) == copies * file_bytes
    assert max(num_bytes for num_bytes, _, _ in results) < 1.2 * copies * file_bytes / world_size
    for _, names, weights in results:
        assert names == results[0][1], "the same order on every rank"
        assert sorted(names) == sorted(stored)
        assert all(torch.equal(weights[name], stored[name]) for name in names)


def test_weights_are_cast_before_they_are_gathered_and_arrive_as_if_cast_after(run_ranks, folder):
    stored = load_file(folder / SINGLE_NAME)
    for _, _, weights in run_ranks(load_sharded, 2, str(folder), {}, "bfloat16"):
        assert all(torch.equal(weights[name], stored[name].bfloat16()) for name in stored)


def export(folder, out, param_dtype, max_file_bytes, num_steps):
    module.MAX_FILE_BYTES, normal = max_file_bytes, module.MAX_FILE_BYTES
    config = EngineConfig(param_dtype=param_dtype)
    engine = TrainEngine.build(Path(folder), config, device=CPU, optimizer=OptimizerConfig(learning_rate=1e-2))
    step = pack(random_samples([9, 7, 3]), num_shards=dist.get_world_size(), max_tokens=16)
    for _ in range(num_steps):
        engine.forward_backward(step.shards[dist.get_rank()], sft_loss, step.denominators)
        engine.optim_step()
    engine.export_hf(Path(out), train_tokenizer(["2+3=5"], vocab_size=261))
    module.MAX_FILE_BYTES = normal
    return {name: tensor.clone() for name, tensor in engine.named_weights(torch.float32)}


@pytest.mark.parametrize("world_size", [1, 4])
def test_export_of_untouched_weights_is_bit_equal_to_save_pretrained(run_ranks, folder, tmp_path, world_size):
    run_ranks(export, world_size, str(folder), str(tmp_path / "out"), "float32", 2**30, 0)
    ours, theirs = load_file(tmp_path / "out" / SINGLE_NAME), load_file(folder / SINGLE_NAME)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", folder))
    assert ours == theirs


def test_trained_export_in_files_of_limited_size_loads_in_transformers_and_in_the_engine(run_ranks, folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, limit = tmp_path / "out", 12_000
    out.mkdir()
    (out / "stale.txt").write_text("from an older export")
    trained = run_ranks(export, 2, str(folder), str(out), "bfloat16", limit, 2)[0]
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    sizes = [[tensor.nbytes for tensor in load_file(file).values()] for file in files]
    assert all(sum(size) <= limit or len(size) == 1 for size in sizes)
    index = json.loads((out / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    assert not (out / "stale.txt").exists()
    assert list(tmp_path.iterdir()) == [out], "no staging folder is left behind"

    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    before = load_file(folder / SINGLE_NAME)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained[name].bfloat16()), name
        assert not torch.equal(trained[name], before[name]), name
    assert AutoTokenizer.from_pretrained(out).decode(AutoTokenizer.from_pretrained(out)("2+3").input_ids) == "2+3"
    again = run_ranks(load_sharded, 2, str(out), {}, "float32")
    assert sum(num_bytes for num_bytes, _, _ in again) == index["metadata"]["total_size"]
    assert all(torch.equal(again[1][2][name], trained[name].bfloat16().float()) for name in trained)


def test_sharded_checkpoints_of_transformers_load(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded, num_bytes = load_whole(tmp_path)
    assert num_bytes == sum(parameter.nbytes for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def pythia(folder):
    """Its output projection is lm_head in the model and embed_out in the files."""
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = AutoModelForCausalLM.from_config(GPTNeoXConfig(vocab_size=101, **sizes))
    model.save_pretrained(folder)
    assert "embed_out.weight" in load_file(folder / SINGLE_NAME)
    return model


def test_renamed_weights_load_under_the_names_of_the_model(tmp_path):
    model = pythia(tmp_path)
    loaded, num_bytes = load_whole(tmp_path)
    assert num_bytes == sum(parameter.nbytes for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def test_renamed_weights_are_sent_as_the_model_and_exported_as_the_files_name_them(run_ranks, tmp_path):
    model = pythia(tmp_path / "in")
    sent = run_ranks(export, 2, str(tmp_path / "in"), str(tmp_path / "out"), "float32", 2**30, 0)[0]
    assert sent.keys() == model.state_dict().keys()
    assert torch.equal(sent["lm_head.weight"], model.lm_head.weight)
    ours, theirs = (load_file(tmp_path / name / SINGLE_NAME) for name in ("out", "in"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_weight_stored_under_both_names_is_refused(tmp_path):
    pythia(tmp_path)
    tensors = load_file(tmp_path / SINGLE_NAME)
    save_file(tensors | {"lm_head.weight": tensors["embed_out.weight"] + 1}, tmp_path / SINGLE_NAME)
    with pytest.raises(ModelError, match=r"1 tensors are not part of the model \(embed_out\.weight\)$"):
        load_whole(tmp_path)


def test_half_precision_checkpoints_are_cast_to_the_masters(tmp_path):
    model = tiny_model("llama").half()
    model.save_pretrained(tmp_path)
    loaded, num_bytes = load_whole(tmp_path)
    assert num_bytes == sum(parameter.nbytes for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.float()), name


def test_checkpoint_of_a_bare_backbone_loads(tmp_path):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    model.base_model.save_pretrained(tmp_path / "bare")
    shutil.copy(tmp_path / "config.json", tmp_path / "bare" / "config.json")
    assert "embed_tokens.weight" in load_file(tmp_path / "bare" / SINGLE_NAME)
    loaded, _ = load_whole(tmp_path / "bare")
    assert all(torch.equal(loaded.get_parameter(name), p) for name, p in model.named_parameters())


def test_tied_copy_and_rotary_frequencies_in_a_checkpoint_are_ignored(qwen):
    tensors = load_file(qwen / SINGLE_NAME)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(
        tensors | {"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        qwen / SINGLE_NAME,
    )
    model, num_bytes = load_whole(qwen)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, embedding)
    assert num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_missing_extra_and_misshapen_tensors_are_listed_together(qwen):
    tensors = load_file(qwen / SINGLE_NAME)
    for layer in (0, 1):
        for part in ("q_proj", "k_proj"):
            del tensors[f"model.layers.{layer}.self_attn.{part}.weight"]
    tensors["model.norm.weight"] = torch.ones(33)
    tensors["value_head.weight"] = torch.ones(1)
    save_file(tensors, qwen / SINGLE_NAME)
    with pytest.raises(ModelError) as error:
        load_whole(qwen)
    assert str(error.value) == (
        f"{qwen} does not fit its config.json (Qwen3ForCausalLM): "
        "4 tensors are missing (model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.q_proj.weight, "
        "model.layers.1.self_attn.k_proj.weight and 1 more); "
        "1 tensors are of the wrong shape (model.norm.weight is [33], expected [32]); "
        "1 tensors are not part of the model (value_head.weight)"
    )


def truncate(folder):
    data = (folder / SINGLE_NAME).read_bytes()
    (folder / SINGLE_NAME).write_bytes(data[: len(data) // 2])


def empty_file(folder):
    (folder / SINGLE_NAME).write_bytes(b"")


def index_of(tree):
    return lambda folder: (folder / INDEX_NAME).write_text(tree if isinstance(tree, str) else json.dumps(tree))


def index_of_a_tensor_that_its_file_lacks(folder):
    names = dict.fromkeys(load_file(folder / SINGLE_NAME), SINGLE_NAME)
    save_file({"another": torch.ones(1)}, folder / "other.safetensors")
    index_of({"weight_map": names | {"model.norm.weight": "other.safetensors"}})(folder)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        empty_file,
        index_of("{"),
        index_of([]),
        index_of({"metadata": {}}),
        index_of({"weight_map": ["model.norm.weight"]}),
        index_of({"weight_map": {"model.norm.weight": "gone.safetensors"}}),
        index_of({"weight_map": {"model.norm.weight": 3}}),
        index_of({"weight_map": {"model.norm.weight": "../elsewhere/model.safetensors"}}),
        index_of_a_tensor_that_its_file_lacks,
    ],
    ids=[
        "truncated",
        "empty",
        "index-broken",
        "index-a-list",
        "index-without-map",
        "map-a-list",
        "file-gone",
        "file-a-number",
        "file-outside",
        "tensor-not-in-file",
    ],
)
def test_damaged_files_are_named(qwen, damage):
    shutil.copytree(qwen, qwen.parent / "elsewhere")
    damage(qwen)
    with pytest.raises(ModelError) as error:
        load_whole(qwen)
    assert str(error.value).startswith(f"{qwen}: the weights cannot be read: ")


def test_only_the_rows_asked_for_are_read(tmp_path):
    save_file({"m": torch.arange(12.0).view(4, 3), "scalar": torch.tensor(7.0)}, tmp_path / SINGLE_NAME)
    source = SafetensorsFolder(tmp_path)
    assert source.names() == {"m", "scalar"}
    assert source.shape("m") == (4, 3)
    assert source.read("m", 1, 3).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert source.read("scalar", 0, 1).tolist() == 7.0


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
