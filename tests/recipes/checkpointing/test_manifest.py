import shutil
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import save_file

from shardwise.config import ModelError
from shardwise.engine.files.safetensors_file import TensorSpec
from shardwise.engine.files.state_files import Cut, Part, ShardFile, StateIndex
from shardwise.engine.files.verified_files import FileRecord, read_sealed_json
from shardwise.recipes.checkpointing.manifest import Manifest, hash_share, verify_share, verify_weights, write_manifest

TEXTS = {"hf/config.json": "{}", "state/run.json": "run"}
WEIGHTS = {"hf/model.safetensors": ["a", "b"], "critic/hf/rank_0.safetensors": ["no shard of a state"]}
SHARDS = ("rank_0.safetensors", "rank_1.safetensors")


@pytest.fixture
def checkpoint(tmp_path):
    for name in (*TEXTS, *WEIGHTS):
        (tmp_path / "step_1" / name).parent.mkdir(parents=True, exist_ok=True)
    for name, text in TEXTS.items():
        (tmp_path / "step_1" / name).write_text(text)
    for name, tensors in WEIGHTS.items():
        save_file({tensor: torch.ones(2) for tensor in tensors}, tmp_path / "step_1" / name)
    state = tmp_path / "step_1" / "state" / "policy"
    state.mkdir()
    tensors = {"master/w": torch.ones(3)}
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    files = {name: ShardFile.write(state / name, specs, tensors.items()) for name in SHARDS}
    cuts = {"master/w": Cut((Part(0, 3, SHARDS[0]), Part(3, 6, SHARDS[1])))}
    StateIndex({"master/w": TensorSpec(torch.float32, (6,))}, cuts, files, {}).write(state)
    return tmp_path / "step_1"


def verified(folders, with_shards=True):
    """By folder the error, or None."""
    errors = []
    for folder in folders:
        try:
            verify_share(folder, with_shards=with_shards)
        except ModelError as error:
            errors.append(str(error))
        else:
            errors.append(None)
    return errors


def test_every_file_is_hashed_by_one_rank_but_shards_by_none(run_ranks, checkpoint):
    """The index beside a shard holds its hashes already."""
    first, second = run_ranks(hash_share, 2, checkpoint)
    assert not first.keys() & second.keys()
    assert first.keys() | second.keys() == {*TEXTS, *WEIGHTS, "state/policy/index.json"}
    assert abs(len(first) - len(second)) == 1
    assert all((first | second)[name]["num_bytes"] == len(text) for name, text in TEXTS.items())
    for name, tensors in WEIGHTS.items():
        record = (first | second)[name]
        assert sorted(record["tensor_xxh3"]) == tensors
        assert record["tensors"] == dict.fromkeys(tensors, "float32 [2]")


def test_a_manifest_tells_what_else_is_known_of_a_checkpoint(tmp_path):
    shares, mesh = [{"a": {"num_bytes": 1, "xxh3": "x"}}], {"dp_replicate": 1, "dp_shard": 1, "sp": 1}
    ids = set()
    for _ in range(2):
        write_manifest(
            tmp_path, shares, step=3, meshes={"policy": mesh}, metrics={"val/accuracy": 0.5}, all_finite=True
        )
        content = read_sealed_json(tmp_path / "manifest.json")
        assert (content["step"], content["num_ranks"], content["meshes"]) == (3, 1, {"policy": mesh})
        ids.add(content["save_id"])
    assert len(ids) == 2
    assert Manifest.read(tmp_path) == Manifest(frozenset({"a"}), {"val/accuracy": 0.5}, True, content["save_id"])
    (tmp_path / "manifest.json").write_text("{")
    assert Manifest.find(tmp_path) is None


def test_a_changed_or_missing_file_is_named_on_every_rank(run_ranks, checkpoint, tmp_path):
    write_manifest(checkpoint, run_ranks(hash_share, 2, checkpoint), step=1)
    copies = [shutil.copytree(checkpoint, tmp_path / f"copy {n}") for n in range(6)]
    weights = copies[1] / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    (copies[2] / "state" / "run.json").unlink()
    (copies[3] / "manifest.json").write_text(
        (checkpoint / "manifest.json").read_text().replace('"step": 1', '"step": 2')
    )
    (copies[4] / "state" / "policy" / "rank_1.safetensors").unlink()
    shard = copies[5] / "state" / "policy" / "rank_0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    first, second = run_ranks(verified, 2, copies)
    assert first == second
    assert first[0] is None
    without_shards = run_ranks(verified, 2, copies, False)[0]
    assert [error is None for error in without_shards] == [True, False, False, False, True, True]
    for error, expected in zip(
        first[1:],
        (
            "hf/model.safetensors is damaged: b is not what was written",
            "state/run.json is missing",
            "manifest.json is damaged",
            "rank_1.safetensors is missing",
            "rank_0.safetensors is damaged: master/w is not what was written",
        ),
        strict=True,
    ):
        assert expected in error


@pytest.mark.parametrize(
    ("name", "tensors", "expected"),
    [
        ("hf/model", {"a": torch.ones(2), "b": torch.ones(2, 1)}, "b is float32 [2, 1], expected float32 [2]"),
        ("hf/model", {"a": torch.ones(2).bfloat16(), "b": torch.ones(2)}, "a is bfloat16 [2], expected float32 [2]"),
        ("hf/model", {"a": torch.ones(2)}, "1 missing: b"),
        ("state/policy/rank_1", {"master/w": torch.ones(3).int()}, "master/w is int32 [3], expected float32 [3]"),
        ("state/policy/rank_1", {"master/w": torch.ones(2)}, "master/w is float32 [2], expected float32 [3]"),
    ],
)
def test_a_whole_file_with_other_tensors_is_told_by_what_is_in_it(run_ranks, checkpoint, name, tensors, expected):
    """Such as weights that somebody has converted, whatever the size of the file; the manifest or the index knows."""
    write_manifest(checkpoint, run_ranks(hash_share, 1, checkpoint), step=1)
    path = checkpoint / f"{name}.safetensors"
    save_file(tensors, path)
    [[error]] = run_ranks(verified, 1, [checkpoint])
    assert error.startswith(f"{path} is damaged: its header is not the one that was written: 1 ")
    assert expected in error


def test_tensors_that_a_save_recorded_otherwise_than_it_wrote_them_are_named(run_ranks, checkpoint):
    """In the manifest, and in the index; the hash of the header agrees."""
    [share] = run_ranks(hash_share, 1, checkpoint)
    name, state = "hf/model.safetensors", checkpoint / "state" / "policy"
    other = {"tensors": {"a": "float32 [2]", "b": "int8 [8]"}}
    write_manifest(checkpoint, [share | {name: share[name] | other}], step=1)
    [[error]] = run_ranks(verified, 1, [checkpoint])
    assert error.endswith("1 of the wrong shape or dtype: b is float32 [2], expected int8 [8]")
    index = StateIndex.read(state)
    replace(index, specs={"master/w": TensorSpec(torch.int32, (6,))}).write(state)
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, run_ranks(hash_share, 1, checkpoint), step=1)
    [[error]] = run_ranks(verified, 1, [checkpoint])
    assert error.startswith(f"{state / SHARDS[0]} is damaged: its header is not the one that was written")
    assert error.endswith("1 of the wrong shape or dtype: master/w is float32 [3], expected int32 [3]")


@pytest.mark.parametrize(
    ("record", "expected"),
    [(FileRecord, "its xxh3 hash"), (ShardFile, "b is not what was written")],
)
def test_a_manifest_of_a_version_that_knew_less_of_weights_is_still_read(run_ranks, checkpoint, record, expected):
    [share] = run_ranks(hash_share, 1, checkpoint)
    write_manifest(checkpoint, [share | {name: asdict(record.of(checkpoint / name)) for name in WEIGHTS}], step=1)
    assert run_ranks(verified, 1, [checkpoint]) == [[None]]
    weights = checkpoint / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert f"hf/model.safetensors is damaged: {expected}" in run_ranks(verified, 1, [checkpoint])[0][0]


@pytest.mark.parametrize("part", ["hf", "critic/hf"])
def test_weights_of_a_run_are_not_taken_without_the_manifest_that_tells_whether_they_are_whole(
    run_ranks, checkpoint, tmp_path, part
):
    in_run = tmp_path / "run" / "checkpoints" / "step_1"
    shutil.copytree(checkpoint, in_run)
    with pytest.raises(ModelError) as refused:
        verify_weights(in_run / part)
    assert str(refused.value) == (
        f"{in_run} has no manifest.json, which is written last: it is not whole, or not a whole copy; take another "
        f"checkpoint, or a copy of {in_run / part} in another place, which is taken as it is"
    )
    write_manifest(in_run, run_ranks(hash_share, 2, in_run), step=1)
    verify_weights(in_run / part)
    verify_weights(shutil.copytree(in_run / part, tmp_path / "checkpoints" / "step_1" / "of another trainer"))
    verify_weights(checkpoint / part)
