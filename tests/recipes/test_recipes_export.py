import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from shardwise.cli import main
from shardwise.config import ConfigError, ModelError
from shardwise.recipes import export as export_module
from shardwise.recipes.checkpointing.manifest import hash_share, write_manifest
from shardwise.recipes.export import export


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SHARDWISE_JOB_FOLDER", "SHARDWISE_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def add_tokenizer(folder, model_folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model_folder / name).read_bytes())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_exported_weights_are_the_sources_cast(model_folder, tmp_path, capsys, dtype):
    GenerationConfig(eos_token_id=[1, 2], temperature=0.7, do_sample=True).save_pretrained(model_folder)
    out = tmp_path / "out"
    assert main(["export", str(model_folder), str(out), "--dtype", dtype]) == 0
    stored, written = tensors_of(model_folder), tensors_of(out)
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        assert written[name].dtype == getattr(torch, dtype)
        assert torch.equal(written[name], tensor.to(getattr(torch, dtype))), name
    before, after = (json.loads((path / "config.json").read_text()) for path in (model_folder, out))
    assert after == before | {"dtype": dtype}
    assert AutoModelForCausalLM.from_pretrained(out).dtype == getattr(torch, dtype)
    generation = GenerationConfig.from_pretrained(out)
    assert (generation.eos_token_id, generation.temperature, generation.do_sample) == ([1, 2], 0.7, True)
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (model_folder, out)]
    assert tokenizers[0]("2+3=5").input_ids == tokenizers[1]("2+3=5").input_ids
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    size = (out / "model.safetensors").stat().st_size / 2**20
    assert capsys.readouterr().out == f"{out}: {dtype}, {size:,.1f} MiB in 1 file\n"


@pytest.mark.parametrize("part", ["hf", "adapter"])
def test_weights_of_a_checkpoint_are_those_that_were_saved_or_it_is_not_exported(
    model_folder, tmp_path, group_of_one, part
):
    folder = tmp_path / "run" / "checkpoints" / "step_3" / part
    shutil.copytree(model_folder, folder)
    if part == "adapter":
        base = AutoModelForCausalLM.from_pretrained(model_folder)
        peft = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
        peft.peft_config["default"].base_model_name_or_path = str(model_folder)
        shutil.rmtree(folder)
        peft.save_pretrained(folder)
    write_manifest(folder.parent, [hash_share(folder.parent)], step=3)
    settings = {"dtype": "float32", "max_shard_size": "5GB"}
    (folder / "README.md").write_text("changed by hand")
    export(str(tmp_path / "run"), str(tmp_path / "whole"), group_of_one, **settings)
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for source in (tmp_path / "run", folder):
        with pytest.raises(ModelError, match=rf"^{file} is damaged: .* is not what was written .*; take another check"):
            export(str(source), str(tmp_path / "damaged"), group_of_one, **settings)
    assert not (tmp_path / "damaged").exists()
    shutil.copytree(folder, tmp_path / "mine")
    export(str(tmp_path / "mine"), str(tmp_path / "as it is"), group_of_one, **settings)


def test_fused_experts_are_written_as_the_files_of_transformers(model_folder, tmp_path, group_of_one):
    """It loads the source in the other dtype and saves it."""
    source = tmp_path / "mixture"
    tiny_model("qwen3_moe", vocab_size=261).save_pretrained(source)
    add_tokenizer(source, model_folder)
    export(str(source), str(tmp_path / "out"), group_of_one, dtype="bfloat16", max_shard_size="0.01MB")
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "expected", max_shard_size="0.01MB"
    )
    written, expected = (
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.safetensors*")}
        for name in ("out", "expected")
    )
    assert len(written) > 3
    assert written == expected


def test_the_newest_checkpoint_of_a_run_is_exported_in_its_own_dtype_by_default(model_folder, tmp_path, group_of_one):
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float16).save_pretrained(checkpoint / "hf")
    add_tokenizer(checkpoint / "hf", model_folder)
    write_manifest(checkpoint, [hash_share(checkpoint)], step=3)
    (tmp_path / "out").mkdir()
    export(str(tmp_path / "run"), str(tmp_path / "out"), group_of_one, dtype=None, max_shard_size="5GB")
    written, stored = tensors_of(tmp_path / "out"), tensors_of(checkpoint / "hf")
    assert all(torch.equal(written[name], stored[name]) and stored[name].dtype == torch.float16 for name in stored)


@pytest.mark.parametrize(("value", "dtype"), [(1e5, "float16"), (math.nan, "bfloat16")])
def test_numbers_that_the_dtype_does_not_hold_are_refused_by_name(model_folder, tmp_path, capsys, value, dtype):
    source = shutil.copytree(model_folder, tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"][3] = value
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert main(["export", str(source), str(tmp_path / "out"), "--dtype", dtype]) == 2
    assert "model.norm.weight holds " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_ranks_share_the_work(model_folder, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "shardwise", "export", str(model_folder), str(out), "--nproc", "2"]
    done = subprocess.run([*command, "--max-shard-size", "0.02MB"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(list(out.glob("*.safetensors"))) > 2
    written, stored = tensors_of(out), tensors_of(model_folder)
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)


def test_a_target_that_holds_something_is_refused_and_left_alone(model_folder, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    for target in (tmp_path, tmp_path / "notes.txt"):
        assert main(["export", str(model_folder), str(target)]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error == f"error: {target} is not an empty folder; name a new one, or remove what is there"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("target", "advice"), [(".", "exported"), ("new/..", "new/../exported"), ("", "exported"), ("..", "../exported")]
)
def test_a_target_without_a_name_is_refused_and_nothing_around_it_is_removed(
    model_folder, tmp_path, monkeypatch, capsys, target, advice
):
    """`new/..` does not exist until something makes `new`, and then it is the folder around it."""
    here = tmp_path / "here"
    here.mkdir()
    if target != ".":
        (here / "notes.txt").write_text("mine")
    monkeypatch.chdir(here)
    assert main(["export", str(model_folder), target]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"error: {target} does not end in the name of a folder; give one, such as {advice}"
    assert [path.name for path in here.iterdir()] == ([] if target == "." else ["notes.txt"])


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_followed(model_folder, tmp_path, is_there):
    (tmp_path / "disk").mkdir()
    if is_there:
        (tmp_path / "disk" / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    assert main(["export", str(model_folder), str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert tensors_of(tmp_path / "disk" / "out").keys() == tensors_of(model_folder).keys()


def test_a_mounted_file_system_is_refused_before_anything_is_written(model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    assert main(["export", str(model_folder), str(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {tmp_path} is where a file system is mounted, ")
    assert error.endswith(f"; name one in it, such as {tmp_path}/exported")
    assert list(tmp_path.iterdir()) == []
    assert main(["export", str(model_folder), str(tmp_path / "exported")]) == 0


@pytest.mark.parametrize("phase", ["named_dtype", "call"])
def test_a_checkpoint_that_a_run_removes_during_its_export_is_told_as_that(
    whole_run, prune, tmp_path, group_of_one, phase
):
    prune(export_module if phase == "named_dtype" else group_of_one, phase)
    with pytest.raises(ModelError, match=rf"step_3/hf was removed while .*; start again with {whole_run}, of which"):
        export(str(whole_run), str(tmp_path / "out"), group_of_one, dtype=None, max_shard_size="5GB")


@pytest.mark.parametrize("phase", ["_base_of", "open_model", "named_dtype"])
def test_an_adapter_that_a_run_removes_during_its_export_is_told_as_that(
    whole_run, prune, model_folder, tmp_path, group_of_one, phase
):
    checkpoint = whole_run / "checkpoints" / "step_3"
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    peft = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    peft.peft_config["default"].base_model_name_or_path = str(model_folder)
    shutil.rmtree(checkpoint / "hf")
    peft.save_pretrained(checkpoint / "adapter")
    write_manifest(checkpoint, [hash_share(checkpoint)], step=3)
    prune(export_module, phase)
    with pytest.raises(ModelError, match=rf"step_3/adapter was removed while .*; start again with {whole_run}, of wh"):
        export(str(whole_run), str(tmp_path / "out"), group_of_one, dtype=None, max_shard_size="5GB")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_source_without_what_is_needed_is_refused(model_folder, tmp_path, group_of_one):
    source = tmp_path / "source"
    tiny_model("llama", vocab_size=261).save_pretrained(source)
    add_tokenizer(source, model_folder)
    options = {"dtype": None, "max_shard_size": "5GB"}
    edit_config(source, dtype=None)
    with pytest.raises(ConfigError, match=r"source/config.json names no dtype; choose one with --dtype, such as bfl"):
        export(str(source), str(tmp_path / "out"), group_of_one, **options)
    edit_config(source, architectures=["OwnModel"])
    with pytest.raises(ModelError, match=r"names the architectures \['OwnModel'\], none of which transformers "):
        export(str(source), str(tmp_path / "out"), group_of_one, **options | {"dtype": "float32"})
    with pytest.raises(ModelError, match=r"^/nowhere/model is not a folder"):
        export("/nowhere/model", str(tmp_path / "out"), group_of_one, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"peft_type": "LORA", "base_mo',
            "cannot be read: Unterminated string starting at: line 1 column 23 (char 22)",
        ),
        ("[]", "does not say in base_model_name_or_path which model it adapts"),
        ('{"base_model_name_or_path": 5}', "does not say in base_model_name_or_path which model it adapts"),
    ],
)
def test_an_adapter_whose_config_is_damaged_is_refused_by_its_name(tmp_path, group_of_one, content, message):
    config = tmp_path / "adapter_config.json"
    config.write_text(content)
    with pytest.raises(ModelError) as refused:
        export(str(tmp_path), str(tmp_path / "out"), group_of_one, dtype=None, max_shard_size="5GB")
    assert str(refused.value).startswith(f"{config} {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--max-shard-size", "5 gigs"], "5 gigs is not a size; give a number and a unit, such as 500MB or 5GB"),
    ],
)
def test_bad_options_end_with_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["export", "source", "target", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
