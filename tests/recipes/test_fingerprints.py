import shutil

import pytest

from shardwise.config import DistillConfig, RLConfig, SFTConfig
from shardwise.recipes.fingerprints import fingerprints

MIB = 1 << 20


def tree_of(model, rows="gone.jsonl"):
    return {"model": {"path": str(model)}, "data": {"train_files": str(rows)}}


def sft(folder):
    return SFTConfig.parse(tree_of(folder / "base", folder / "rows.jsonl"), origin="test")


@pytest.fixture
def files(tmp_path):
    """A model of 3 MiB, too large to be read whole, and rows."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "base" / "model.safetensors").write_bytes(bytes(range(256)) * (3 * MIB // 256))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    return tmp_path


def test_the_same_files_elsewhere_have_the_same_fingerprints(files, tmp_path_factory):
    found = fingerprints(sft(files))
    assert list(found) == ["model.path", "data.train_files"]
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(files, copy, dirs_exist_ok=True)
    (copy / "base" / ".cache").mkdir()
    (copy / "base" / ".gitattributes").write_text("x")
    (copy / "base" / "README.md").write_text("what nobody computes with")
    assert fingerprints(sft(copy)) == found


@pytest.mark.parametrize(
    ("path", "change", "key"),
    [
        ("base/config.json", lambda content: b"{ }", "model.path"),
        ("base/model.safetensors", lambda content: content + b"x", "model.path"),
        ("base/model.safetensors", lambda content: bytes(len(content)), "model.path"),
        ("base/model.safetensors", lambda content: b"x" + content[1:], "model.path"),
        ("base/model.safetensors", lambda content: content[:-1] + b"x", "model.path"),
        ("base/tokenizer.json", lambda content: b"{}", "model.path"),
        ("rows.jsonl", lambda content: content.replace(b"1+1", b"1+2"), "data.train_files"),
    ],
)
def test_what_changed_is_seen(files, path, change, key):
    before = fingerprints(sft(files))
    content = (files / path).read_bytes() if (files / path).exists() else b""
    (files / path).write_bytes(change(content))
    after = fingerprints(sft(files))
    assert {name for name in before if before[name] != after[name]} == {key}


def test_every_model_of_a_config_is_looked_at_and_what_is_not_here_is_left_out(files):
    (files / "template.jinja").write_text("{{ messages }}")
    shutil.copytree(files / "base", files / "critic")
    tree = {
        "model": {"path": str(files / "base"), "chat_template": str(files / "template.jinja")},
        "critic": {"model": {"path": str(files / "critic")}},
        "algorithm": {"advantage": "gae"},
        "data": {"train_files": [str(files / "rows.jsonl"), str(files / "gone.jsonl")]},
        "reward": {"functions": [{"function": "rules.py"}]},
    }
    found = fingerprints(RLConfig.parse(tree, origin="test"))
    assert set(found) == {"model.path", "model.chat_template", "critic.model.path", "data.train_files"}
    assert found["critic.model.path"] == found["model.path"]
    tree = {**tree_of("org/none"), "teacher": {"model": {"path": str(files / "base")}}}
    assert list(fingerprints(DistillConfig.parse(tree, origin="test"))) == ["teacher.model.path"]


def test_folders_of_rows_count_with_all_their_files(files):
    (files / "rows").mkdir()
    for name in ("a.arrow", "b.arrow"):
        (files / "rows" / name).write_text(name)
    tree = tree_of("org/none", files / "rows")
    before = fingerprints(SFTConfig.parse(tree, origin="test"))
    (files / "rows" / "b.arrow").rename(files / "rows" / "c.arrow")
    after = fingerprints(SFTConfig.parse(tree, origin="test"))
    assert before.keys() == after.keys() == {"data.train_files"}
    assert before != after
