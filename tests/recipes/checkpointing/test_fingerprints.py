import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.config import ConfigError, DistillConfig, LoraConfig, ModelConfig, RLConfig, SFTConfig
from shardwise.engine.files.model_folder import PROCESSOR_FILES
from shardwise.recipes.checkpointing.fingerprints import changed_files, fingerprints, require_base_of_adapter


def tree_of(model, rows="gone.jsonl"):
    return {"model": {"path": str(model)}, "data": {"train_files": str(rows)}}


def sft(folder):
    return SFTConfig.parse(tree_of(folder / "base", folder / "rows.jsonl"), origin="test")


@pytest.fixture
def files(tmp_path):
    """A model of 4 MB, too large to be read whole, and rows."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    weights = {f"layers.{layer}.{kind}": torch.rand(3000 if kind == "norm" else 90_000) for layer in range(12)
               for kind in ("norm", "proj")}  # fmt: skip
    save_file(weights, tmp_path / "base" / "model.safetensors")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    return tmp_path


def test_the_same_files_elsewhere_have_the_same_fingerprints_whatever_lies_beside_them(files, tmp_path_factory):
    found = fingerprints(sft(files))
    assert {key: [name for name, _ in names] for key, names in found.items()} == {
        "model.path": ["config.json", "model.safetensors"],
        "data.train_files": ["rows.jsonl"],
    }
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(files, copy, dirs_exist_ok=True)
    for name in (".gitattributes", "README.md", "trainer_state.json", "LICENSE.txt"):
        (copy / "base" / name).write_text("what nobody computes with")
    assert fingerprints(sft(copy)) == found


@pytest.mark.parametrize(
    ("path", "change", "key"),
    [
        ("base/config.json", lambda content: b"{ }", "model.path"),
        ("base/tokenizer.json", lambda content: b"{}", "model.path"),
        ("base/chat_template.jinja", lambda content: b"{}", "model.path"),
        ("rows.jsonl", lambda content: content.replace(b"1+1", b"1+2"), "data.train_files"),
    ],
)
def test_a_file_that_changed_or_came_is_named(files, path, change, key):
    before = fingerprints(sft(files))
    content = (files / path).read_bytes() if (files / path).exists() else b""
    (files / path).write_bytes(change(content))
    assert changed_files(before, fingerprints(sft(files))) == {key: path.rpartition("/")[2]}


def test_one_byte_of_rows_is_noticed_wherever_it_is(files):
    line = b'{"prompt": "1+1="}\n'
    for number in (0, 40_000, 99_999, 120_000):
        rows = [line] * 120_001  # 2.3 MB
        (files / "rows.jsonl").write_bytes(b"".join(rows))
        before = fingerprints(sft(files))
        rows[number] = line.replace(b"1+1", b"1+2")
        (files / "rows.jsonl").write_bytes(b"".join(rows))
        assert changed_files(before, fingerprints(sft(files))) == {"data.train_files": "rows.jsonl"}


def test_a_large_file_of_an_early_checkpoint_of_which_parts_were_hashed_is_no_changed_one(files):
    (files / "rows.jsonl").write_bytes(b'{"prompt": "1+1="}\n' * 120_000)
    now = fingerprints(sft(files))
    ((name, digest),) = now["data.train_files"]
    assert digest.startswith("whole:")
    early = now | {"data.train_files": [[name, "9d9b1ba6a5f8c2e1"]]}
    assert changed_files(early, now) == {}
    assert changed_files(early, now | {"data.train_files": [["other.jsonl", digest]]}) == {
        "data.train_files": "rows.jsonl"
    }
    assert changed_files(early | {"model.path": [["config.json", "0"]]}, now) == {"model.path": "config.json"}


@pytest.mark.parametrize("name", PROCESSOR_FILES)
def test_f32_another_image_processor_is_noticed_where_there_was_one(files, name):
    """It decides what pixels a model is shown. One that was not recorded yet is no changed one."""
    early, path = fingerprints(sft(files)), files / "base" / name
    path.write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    before = fingerprints(sft(files))
    assert changed_files(early, before) == {}
    path.write_text('{"image_mean": [0.4, 0.5, 0.5]}')
    assert changed_files(before, fingerprints(sft(files))) == {"model.path": name}
    path.unlink()
    assert changed_files(before, fingerprints(sft(files))) == {"model.path": name}
    path.write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    assert changed_files(before, fingerprints(sft(files))) == {}
    other = next(one for one in PROCESSOR_FILES if one != name)
    (files / "base" / other).write_text("{}")
    assert changed_files(before, fingerprints(sft(files))) == {"model.path": other}


def test_f32_a_template_as_old_folders_have_it_is_noticed_where_there_was_one(files):
    """Checkpoints from before it was read do not have it."""
    early = fingerprints(sft(files))
    (files / "base" / "chat_template.json").write_text('{"chat_template": "a"}')
    before = fingerprints(sft(files))
    assert changed_files(early, before) == {}
    (files / "base" / "chat_template.json").write_text('{"chat_template": "b"}')
    assert changed_files(before, fingerprints(sft(files))) == {"model.path": "chat_template.json"}


@pytest.mark.parametrize("trained", ["layers.0.norm", "layers.7.norm", "layers.3.proj", "layers.11.proj"])
def test_f32_training_of_any_part_of_a_model_is_noticed(files, trained):
    before = fingerprints(sft(files))
    path = files / "base" / "model.safetensors"
    weights = load_file(path)
    weights[trained] *= 1.01
    save_file(weights, path)
    assert path.stat().st_size > 1 << 20
    assert changed_files(before, fingerprints(sft(files))) == {"model.path": "model.safetensors"}


def test_every_model_of_a_config_is_looked_at_and_what_is_not_here_is_left_out(files):
    (files / "template.jinja").write_text("{{ messages }}")
    shutil.copytree(files / "base", files / "critic")
    (files / "words").mkdir()
    (files / "words" / "tokenizer.json").write_text("{}")
    (files / "words" / "README.md").write_text("of nobody's concern")
    tree = {
        "model": {
            "path": str(files / "base"),
            "tokenizer_path": str(files / "words"),
            "chat_template": str(files / "template.jinja"),
        },
        "critic": {"model": {"path": str(files / "critic")}},
        "algorithm": {"advantage": "gae"},
        "data": {"train_files": [str(files / "rows.jsonl"), str(files / "gone.jsonl")]},
        "reward": {"functions": [{"function": "rules.py"}]},
    }
    found = fingerprints(RLConfig.parse(tree, origin="test"))
    keys = ("model.path", "model.tokenizer_path", "model.chat_template", "critic.model.path", "data.train_files")
    assert tuple(found) == keys
    assert found["critic.model.path"] == found["model.path"]
    assert [name for name, _ in found["model.tokenizer_path"]] == ["tokenizer.json"]
    tree = {**tree_of("org/none"), "teacher": {"model": {"path": str(files / "base")}}}
    assert list(fingerprints(DistillConfig.parse(tree, origin="test"))) == ["teacher.model.path"]


def test_of_a_folder_of_rows_only_the_files_that_hold_them_count(files):
    import datasets

    config = SFTConfig.parse(tree_of("org/none", files / "rows"), origin="test")
    datasets.Dataset.from_list([{"prompt": "1+1="}] * 4).save_to_disk(files / "rows")
    before = fingerprints(config)
    datasets.load_from_disk(files / "rows").filter(lambda row: True)  # leaves a cache there
    assert fingerprints(config) == before
    (data,) = (one["filename"] for one in json.loads((files / "rows" / "state.json").read_text())["_data_files"])
    (files / "rows" / data).write_bytes((files / "rows" / data).read_bytes() + b"x")
    assert changed_files(before, fingerprints(config)) == {"data.train_files": data}


def test_a_file_that_cannot_be_opened_is_named(files, monkeypatch):
    def denied(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    config = sft(files)
    monkeypatch.setattr("pathlib.Path.open", denied)
    with pytest.raises(ConfigError, match=r"model\.path: .*config\.json cannot be read \(.*Permission denied"):
        fingerprints(config)


def test_an_adapter_of_other_weights_is_refused_wherever_its_own_are(files):
    """Shapes cannot tell. A copy of the base is the base, and one that is not here cannot be compared."""
    base, adapter = files / "base", files / "adapter"
    shutil.copytree(base, files / "copy")
    shutil.copytree(base, files / "other")
    weights = load_file(files / "other" / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, files / "other" / "model.safetensors")
    adapter.mkdir()

    def check(trained_on, model):
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(trained_on)}))
        require_base_of_adapter(LoraConfig(adapter_path=str(adapter)), ModelConfig(path=str(model)), "engine.lora")

    check(base, base)
    check(base, files / "copy")
    check(files / "gone", base)
    with pytest.raises(ConfigError) as error:
        check(base, files / "other")
    assert str(error.value) == (
        f"engine.lora.adapter_path={adapter} was trained on {base}, whose weights are not those of model.path="
        f"{files / 'other'} (model.safetensors); set model.path to the model that it belongs to, or begin a new adapter"
    )
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(
        ConfigError, match=rf"engine\.lora\.adapter_path={adapter} is no LoRA adapter: it has no adapter_"
    ):
        require_base_of_adapter(LoraConfig(adapter_path=str(adapter)), ModelConfig(path=str(base)), "engine.lora")
    require_base_of_adapter(None, ModelConfig(path=str(base)), "engine.lora")
