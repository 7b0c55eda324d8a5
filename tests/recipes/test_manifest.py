import shutil

import pytest

from shardwise.config import ModelError
from shardwise.recipes.manifest import hash_share, verify_share, write_manifest

FILES = {"hf/model.safetensors": "weights", "hf/config.json": "{}", "state/run.json": "run",
         "state/policy/index.json": "index", "critic/hf/rank_0.safetensors": "no shard"}  # fmt: skip
SHARDS = ("state/policy/rank_0.safetensors", "state/policy/rank_1.safetensors")


@pytest.fixture
def checkpoint(tmp_path):
    for name, text in {**FILES, **dict.fromkeys(SHARDS, "shard")}.items():
        (tmp_path / "step_1" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "step_1" / name).write_text(text)
    return tmp_path / "step_1"


def verified(folders):
    """By folder the error, or None."""
    errors = []
    for folder in folders:
        try:
            verify_share(folder)
        except ModelError as error:
            errors.append(str(error))
        else:
            errors.append(None)
    return errors


def test_every_file_is_hashed_by_one_rank_but_shards_by_none(run_ranks, checkpoint):
    """The index beside a shard holds its hashes already."""
    first, second = run_ranks(hash_share, 2, checkpoint)
    assert not first.keys() & second.keys()
    assert first.keys() | second.keys() == FILES.keys()
    assert abs(len(first) - len(second)) == 1
    assert all(record["num_bytes"] == len(FILES[name]) for name, record in (first | second).items())


def test_a_changed_or_missing_file_is_named_on_every_rank(run_ranks, checkpoint, tmp_path):
    write_manifest(checkpoint, run_ranks(hash_share, 2, checkpoint), step=1)
    copies = [shutil.copytree(checkpoint, tmp_path / f"copy {n}") for n in range(4)]
    (copies[1] / "hf" / "model.safetensors").write_text("weighty")
    (copies[2] / "state" / "run.json").unlink()
    (copies[3] / "manifest.json").write_text(
        (checkpoint / "manifest.json").read_text().replace('"step": 1', '"step": 2')
    )
    first, second = run_ranks(verified, 2, copies)
    assert first == second
    assert first[0] is None
    for error, expected in zip(
        first[1:],
        ("hf/model.safetensors is damaged: its xxh3", "state/run.json is missing", "manifest.json is damaged"),
        strict=True,
    ):
        assert expected in error
