import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from family_table import FAMILIES as FAMILY_TABLE
from family_table import random_model
from safetensors.torch import load_file
from tiny_models import MOE_FAMILIES, empty_model, tiny_folder, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig, Qwen3Config, Qwen3ForCausalLM

from shardwise.config import ExportError
from shardwise.data.synthetic import train_tokenizer
from shardwise.engine.files import export as module
from shardwise.engine.files.export import ExportPlan, StagedExport, export_folder
from shardwise.engine.files.loading import load_weights
from shardwise.engine.files.model_folder import INDEX_NAME, SINGLE_NAME
from shardwise.engine.files.safetensors_file import SafetensorsWriter
from shardwise.engine.files.staging import Copies, StagingBuffers
from shardwise.engine.weights import stream_weights

TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def export(folder, out, dtype_name, max_shard_size):
    model = empty_model(Path(folder), dim=0)
    load_weights(model, Path(folder))
    dtype = getattr(torch, dtype_name)
    tokenizer = train_tokenizer(["2+3=5"], vocab_size=261)
    export_folder(model, tokenizer, Path(out), dtype, max_shard_size=max_shard_size)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in TOKENIZER_FILES}


@pytest.mark.parametrize("family", ["qwen3", "llama", *MOE_FAMILIES])
@pytest.mark.parametrize(
    ("world_size", "dtype", "max_shard_size"), [(1, "float32", "1GB"), (2, "bfloat16", "1GB"), (4, "float32", 9000)]
)
def test_f31_every_file_is_that_of_save_pretrained(run_ranks, tmp_path, family, world_size, dtype, max_shard_size):
    """Config, generation config, index and weights, byte for byte: tied, untied and fused; one file and many."""
    source, expected, out = (tmp_path / name for name in ("source", "expected", "out"))
    tiny_folder(family, source)
    tiny_model(family).to(getattr(torch, dtype)).save_pretrained(expected, max_shard_size=max_shard_size)
    run_ranks(export, world_size, str(source), str(out), dtype, max_shard_size)
    assert files_of(out) == files_of(expected)
    assert (len(list(out.glob("*.safetensors"))) > world_size) == (max_shard_size == 9000)
    assert sorted(tmp_path.iterdir()) == sorted([source, expected, out]), "no staging folder is left behind"


def test_renamed_weights_are_exported_as_the_files_name_them(run_ranks, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = AutoModelForCausalLM.from_config(GPTNeoXConfig(vocab_size=101, **sizes))
    model.save_pretrained(tmp_path / "in")
    run_ranks(export, 2, str(tmp_path / "in"), str(tmp_path / "out"), "float32", "1GB")
    assert "embed_out.weight" in load_file(tmp_path / "out" / SINGLE_NAME)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "in")


@pytest.mark.parametrize("family", ["llama", *MOE_FAMILIES])
def test_an_export_replaces_what_was_there_and_loads_again(run_ranks, tmp_path, family):
    source, out = tiny_folder(family, tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    (out / "stale.txt").write_text("from an older export")
    run_ranks(export, 2, str(source), str(out), "float16", 9000)
    assert not (out / "stale.txt").exists()
    index = json.loads((out / INDEX_NAME).read_text())
    files = sorted(out.glob("*.safetensors"))
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.float16
    for name, parameter in tiny_model(family).named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.half()), name
    again = empty_model(out)
    assert load_weights(again, out) == index["metadata"]["total_size"]
    assert all(torch.equal(again.get_parameter(name), p.float()) for name, p in loaded.named_parameters())
    assert AutoTokenizer.from_pretrained(out).decode(AutoTokenizer.from_pretrained(out)("2+3").input_ids) == "2+3"


NAMED = {"AutoConfig": "modeling_q.Config", "AutoModelForCausalLM": "modeling_q.Model"}


def add_to(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def export_with_its_tokenizer(folder, out):
    model = empty_model(Path(folder), dim=0)
    load_weights(model, Path(folder))
    export_folder(model, AutoTokenizer.from_pretrained(folder), Path(out), torch.float32)


@pytest.mark.parametrize("tokenizers_map", [{"AutoTokenizer": [None, "tokenization_q.T"]}, [None, "tokenization_q.T"]])
def test_code_that_is_not_written_along_is_not_named(run_ranks, tmp_path, tokenizers_map):
    """The folder loads also where its code may be run: transformers would look for it."""
    source, out = tiny_folder("qwen3", tmp_path / "source", vocab_size=261), tmp_path / "out"
    train_tokenizer(["2+3=5 \u00fc"], vocab_size=261).save_pretrained(source)
    run_ranks(export_with_its_tokenizer, 1, str(source), str(tmp_path / "plain"))
    add_to(source / "config.json", auto_map=NAMED)
    add_to(source / "tokenizer_config.json", auto_map=tokenizers_map)
    for name in ("modeling_q.py", "tokenization_q.py"):
        (source / name).write_text("raise SystemExit")
    run_ranks(export_with_its_tokenizer, 1, str(source), str(out))
    plain, written = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (tmp_path / "plain", out)
    )
    assert written == plain
    assert type(AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)).__name__ == "Qwen3ForCausalLM"
    assert AutoTokenizer.from_pretrained(out, trust_remote_code=True)("2+3").input_ids


def test_a_tokenizers_code_on_the_hub_stays_named(run_ranks, tmp_path):
    source, out = tiny_folder("qwen3", tmp_path / "source", vocab_size=261), tmp_path / "out"
    train_tokenizer(["2+3=5"], vocab_size=261).save_pretrained(source)
    kept = {"AutoTokenizer": [None, "owner/name--tokenization_q.T"]}
    add_to(source / "tokenizer_config.json", auto_map=kept | {"AutoProcessor": "processing_q.P"})
    run_ranks(export_with_its_tokenizer, 1, str(source), str(out))
    assert json.loads((out / "tokenizer_config.json").read_text())["auto_map"] == kept


class OwnConfig(Qwen3Config):
    model_type = "own_class"
    _auto_class = "AutoConfig"  # as register_for_auto_class sets it


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
    _auto_class = "AutoModelForCausalLM"


def export_own_class(folder, out):
    AutoConfig.register("own_class", OwnConfig, exist_ok=True)
    AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM, exist_ok=True)
    export(folder, out, "float32", "1GB")


def test_code_of_a_class_that_is_registered_with_it_is_written_as_by_save_pretrained(run_ranks, tmp_path):
    model = OwnForCausalLM(OwnConfig(**tiny_model("qwen3").config.to_dict() | {"model_type": "own_class"}))
    model.save_pretrained(tmp_path / "source")
    run_ranks(export_own_class, 1, str(tmp_path / "source"), str(tmp_path / "out"))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "source")
    assert (tmp_path / "out" / Path(__file__).name).is_file()
    named = json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]
    stem = Path(__file__).stem
    assert named == {"AutoConfig": f"{stem}.OwnConfig", "AutoModelForCausalLM": f"{stem}.OwnForCausalLM"}


class Recorder(SafetensorsWriter):
    """Notes who writes what."""

    written: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, path, specs):
        super().__init__(path, specs)
        self.name = path.name

    def write(self, name, tensor):
        self.written.append((self.name, name))
        super().write(name, tensor)


def export_recorded(folder, out):
    module.SafetensorsWriter = Recorder
    Recorder.written = []
    try:
        export(folder, out, "float32", 9000)
    finally:
        module.SafetensorsWriter = SafetensorsWriter
    return Recorder.written


def test_files_are_dealt_to_the_ranks_and_each_tensor_has_one_writer(run_ranks, tmp_path):
    tiny_folder("qwen3_moe", tmp_path / "source")
    written = run_ranks(export_recorded, 3, str(tmp_path / "source"), str(tmp_path / "out"))
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 6
    for rank, pairs in enumerate(written):
        assert {file for file, _ in pairs} == set(files[rank::3])
    weight_map = json.loads((tmp_path / "out" / INDEX_NAME).read_text())["weight_map"]
    assert sorted(pair for pairs in written for pair in pairs) == sorted((file, n) for n, file in weight_map.items())


class FullDisk(SafetensorsWriter):
    """The second tensor of rank 1 does not fit."""

    num_written = 0

    def write(self, name, tensor):
        FullDisk.num_written += 1
        if dist.get_rank() == 1 and FullDisk.num_written == 2:
            raise OSError(28, "No space left on device")
        super().write(name, tensor)


def export_onto_a_full_disk(folder, out):
    module.SafetensorsWriter, FullDisk.num_written = FullDisk, 0
    try:
        export(folder, out, "float32", 9000)
        return "written"
    except ExportError as error:
        return str(error)
    finally:
        module.SafetensorsWriter = SafetensorsWriter


def test_f20_a_rank_that_cannot_write_fails_all_and_leaves_the_old_folder(run_ranks, tmp_path):
    source, out = tiny_folder("llama", tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    (out / "old.txt").write_text("the last good export")
    expected = (
        f"rank 1: {tmp_path}/.out.partial cannot be written: [Errno 28] No space left on device; free space there, or "
        "choose a folder that every rank can write to"
    )
    assert run_ranks(export_onto_a_full_disk, 2, str(source), str(out)) == [expected] * 2
    assert [path.name for path in out.iterdir()] == ["old.txt"]
    assert sorted(tmp_path.iterdir()) == sorted([source, out]), "no staging folder fills the disk further"


def export_error(folder, out):
    try:
        export(folder, out, "float32", "1GB")
        return "written"
    except ExportError as error:
        return str(error)


def test_a_folder_that_rank_0_cannot_make_fails_on_all(run_ranks, tmp_path):
    tiny_folder("llama", tmp_path / "source")
    (tmp_path / "file").write_text("")
    (text, other) = run_ranks(export_error, 2, str(tmp_path / "source"), str(tmp_path / "file" / "out"))
    assert text == other
    assert text.startswith(f"rank 0: {tmp_path}/file/.out.partial cannot be written: [Errno 20] Not a directory")


def given_weights_error(folder, out, value):
    weights = dict(tiny_model("qwen3_moe").state_dict())
    weights["model.layers.1.mlp.experts.down_proj"][3, 0, 0] = value
    try:
        export_folder(
            empty_model(Path(folder)),
            train_tokenizer(["2+3=5"], vocab_size=261),
            Path(out),
            torch.float16,
            weights=weights,
        )
        return "written"
    except ExportError as error:
        return str(error)


def test_weights_of_elsewhere_are_looked_through_in_the_files_dtype(run_ranks, tmp_path):
    source = str(tiny_folder("qwen3_moe", tmp_path / "source"))
    assert run_ranks(given_weights_error, 1, source, str(tmp_path / "out"), 65_520.0) == [
        "model.layers.1.mlp.experts.down_proj holds NaN or infinities as float16: its values are too large for that "
        "dtype (which ends at 65,504), or no numbers in the source; use --dtype bfloat16 or float32"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert run_ranks(given_weights_error, 1, source, str(tmp_path / "out"), 65_504.0) == ["written"]


def names_not_finite_when_staged():
    model = random_model("gemma4", FAMILY_TABLE["gemma4"])
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("put_max"):
                buffer.fill_(torch.inf)
        model.get_submodule("model.audio_tower.layers.0.feed_forward1.ffw_layer_1").input_min.fill_(torch.nan)
        model.model.language_model.norm.weight[3] = torch.inf
    plan = ExportPlan.of(model, torch.float32)
    return StagedExport.of(plan, StagingBuffers(Copies())).nonfinite_names()


def test_a_staged_buffer_may_be_infinite_and_no_nan(run_ranks):
    bound = "model.audio_tower.layers.0.feed_forward1.ffw_layer_1.input_min"
    assert [sorted(names) for names in run_ranks(names_not_finite_when_staged, 1)] == [
        [bound, "model.language_model.norm.weight"]
    ]


def trained_then_exported(folder, out):
    """The masters change between loading and exporting; returns them."""
    model = empty_model(Path(folder), dim=0)
    load_weights(model, Path(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    export_folder(model, train_tokenizer(["2+3=5"], vocab_size=261), Path(out), torch.bfloat16)
    return {name: tensor.clone() for name, tensor in stream_weights(model, torch.float32)}


def test_the_weights_of_the_moment_are_exported(run_ranks, tmp_path):
    source = tiny_folder("qwen3_moe", tmp_path / "source")
    trained = run_ranks(trained_then_exported, 2, str(source), str(tmp_path / "out"))[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = tiny_model("qwen3_moe").state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, trained[name].bfloat16()), name
        assert torch.equal(trained[name], before[name] * 1.5), name
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
