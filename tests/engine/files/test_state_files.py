import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.config import DamagedError, ModelError
from shardwise.engine.files.safetensors_file import TensorSpec
from shardwise.engine.files.state_files import Cut, Part, ShardFile, StateIndex, own_share
from shardwise.engine.files.verified_files import read_sealed_json, write_sealed_json

TENSORS = {"exp_avg/a": torch.arange(6.0).view(2, 3), "step/a": torch.tensor(4.0), "master/b": torch.ones(3).bfloat16()}
SPECS = {name: TensorSpec.of(tensor) for name, tensor in TENSORS.items()}
INDEX = StateIndex(
    specs={"exp_avg/a": TensorSpec(torch.float32, (4, 3)), "step/a": TensorSpec(torch.bfloat16, ())},
    cuts={
        "exp_avg/a": Cut((Part(0, 2, "rank_0.safetensors"), Part(2, 4, "rank_1.safetensors"))),
        "step/a": Cut((Part(0, 1, "rank_0.safetensors"),)),
    },
    files={
        "rank_0.safetensors": ShardFile(100, "ab", {"exp_avg/a": "cd", "step/a": "ef"}),
        "rank_1.safetensors": ShardFile(100, "ab", {"exp_avg/a": "cd"}),
    },
    numbers={"num_steps": 7, "loss_scaler": None},
)


def test_a_shard_file_is_one_of_safetensors(tmp_path):
    written = ShardFile.write(tmp_path / "f", SPECS, TENSORS.items())
    assert {name: tensor.tolist() for name, tensor in load_file(tmp_path / "f").items()} == {
        name: tensor.tolist() for name, tensor in TENSORS.items()
    }
    written.check(tmp_path / "f")


def test_every_flipped_bit_of_a_shard_file_is_noticed(tmp_path):
    written = ShardFile.write(tmp_path / "f", SPECS, TENSORS.items())
    data = (tmp_path / "f").read_bytes()
    for position in range(len(data)):
        for bit in (0, 3, 7):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            (tmp_path / "f").write_bytes(flipped)
            with pytest.raises(ModelError, match=str(tmp_path / "f")):
                written.check(tmp_path / "f")


def test_a_file_that_is_there_is_recorded_as_when_it_was_written(tmp_path):
    assert ShardFile.write(tmp_path / "f", SPECS, TENSORS.items()) == ShardFile.of(tmp_path / "f")
    (tmp_path / "f").write_text("no tensors")
    with pytest.raises(ModelError, match="f cannot be read as a safetensors file"):
        ShardFile.of(tmp_path / "f")


def test_a_header_that_can_no_longer_be_read_is_named(tmp_path):
    written = ShardFile.write(tmp_path / "f", SPECS, TENSORS.items())
    data = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(data[:8] + b"x" + data[9:])
    with pytest.raises(ModelError, match=r"f is damaged: its header is not the one that was written"):
        written.check(tmp_path / "f")


def test_the_tensor_that_changed_is_named(tmp_path):
    written = ShardFile.write(tmp_path / "f", SPECS, TENSORS.items())
    data = bytearray((tmp_path / "f").read_bytes())
    place = data.index(TENSORS["exp_avg/a"].numpy().tobytes())
    data[place + 5] ^= 1
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(ModelError, match="f is damaged: exp_avg/a is not what was written"):
        written.check(tmp_path / "f")


def test_the_index_comes_back_as_it_was(tmp_path):
    INDEX.write(tmp_path)
    found = StateIndex.read(tmp_path)
    assert (found.specs, found.files, found.numbers) == (INDEX.specs, INDEX.files, INDEX.numbers)
    assert {name: cut.parts for name, cut in found.cuts.items()} == {n: cut.parts for n, cut in INDEX.cuts.items()}


def test_a_cut_that_tensors_share_is_written_once(tmp_path):
    shared = Cut(tuple(Part(row, row + 1, f"rank_{row}.safetensors") for row in range(100)))
    specs = {f"{number}": TensorSpec(torch.float32, (100, 1 + number)) for number in range(50)}
    files = {part.file: ShardFile(1, "ab", dict.fromkeys(specs, "cd")) for part in shared.parts}
    StateIndex(specs, dict.fromkeys(specs, shared), files, {}).write(tmp_path)
    content = read_sealed_json(tmp_path / "index.json")
    assert content["cuts"] == [[list(part) for part in shared.parts]]
    found = StateIndex.read(tmp_path)
    assert len(set(found.cuts.values())) == 1
    assert found.cuts["7"].parts == shared.parts


def test_the_parts_of_some_rows_are_those_that_overlap_them():
    cut = Cut(tuple(Part(start, stop, f"{start}") for start, stop in [(0, 3), (3, 4), (4, 9)]))
    for start in range(10):
        for stop in range(start, 11):
            wanted = [part for part in cut.parts if set(range(part.start, part.stop)) & set(range(start, stop))]
            assert list(cut.parts_of(range(start, stop))) == wanted


def test_another_format_is_refused(tmp_path):
    INDEX.write(tmp_path)
    content = read_sealed_json(tmp_path / "index.json")
    write_sealed_json(tmp_path / "index.json", content | {"format": 1})
    with pytest.raises(ModelError, match="has format 1, and this version of Shardwise reads 2"):
        StateIndex.read(tmp_path)


@pytest.mark.parametrize(("num_shards", "world_size"), [(12, 12), (12, 4), (3, 2), (2, 3)])
def test_every_file_is_one_ranks_and_a_shard_that_of_its_writer(monkeypatch, num_shards, world_size):
    shards = [f"state/{role}/rank_{rank}.safetensors" for role in ("policy", "critic") for rank in range(num_shards)]
    others = ["hf/config.json", "hf/model.safetensors", "state/policy/index.json", "hf/rank_1.safetensors.txt"]
    shares = []
    for rank in range(world_size):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: world_size)
        shares.append(own_share([*others, *shards]))
    assert sorted(name for share in shares for name in share) == sorted([*shards, *others])
    for rank, share in enumerate(shares):
        written = {f"rank_{writer}.safetensors" for writer in range(rank, num_shards, world_size)}
        assert {name.rpartition("/")[2] for name in share if name in shards} == written
    numbers = [sum(name in others for name in share) for share in shares]
    assert max(numbers) - min(numbers) <= 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: content["files"].pop("rank_1.safetensors"), "KeyError: 'rank_1.safetensors'"),
        (lambda content: content["cuts"][0].pop(), "the parts of exp_avg/a are not all of it"),
        (lambda content: content["cuts"][0][1].__setitem__(0, 1), "the parts of exp_avg/a are not all of it"),
        (lambda content: content["cuts"][0].insert(1, [2, 2, "rank_1.safetensors"]), "the parts of exp_avg/a are not"),
        (lambda content: content["cuts"].__setitem__(0, [[0, 6, "f"], [6, 4, "g"]]), "the parts of exp_avg/a are not"),
        (lambda content: content["cuts"].__setitem__(0, [[0, 4]]), "TypeError: "),
        (lambda content: content["tensors"]["step/a"].update(shape=[2]), "the parts of step/a are not all of it"),
        (lambda content: content["tensors"]["step/a"].update(cut=2), "KeyError: 2"),
        (lambda content: content["tensors"]["step/a"].update(cut=-1), "KeyError: -1"),
        (lambda content: content["tensors"]["exp_avg/a"].update(xxh3="cd"), "shorter than"),
        (lambda content: content["tensors"]["exp_avg/a"].pop("dtype"), "KeyError: 'dtype'"),
        (lambda content: content.pop("format"), "KeyError: 'format'"),
        (lambda content: content.update(files=None), "AttributeError: "),
    ],
)
def test_an_index_that_does_not_tell_of_all_tensors_is_refused(tmp_path, change, problem):
    """Under a hash that agrees."""
    INDEX.write(tmp_path)
    content = read_sealed_json(tmp_path / "index.json")
    change(content)
    write_sealed_json(tmp_path / "index.json", content)
    with pytest.raises(DamagedError) as error:
        StateIndex.read(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'index.json'} is damaged: it is not what was written (")
    assert problem in str(error.value)


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, DamagedError), (errno.EMFILE, ModelError)])
def test_what_keeps_a_file_from_being_opened_is_damage_where_the_disk_fails(tmp_path, monkeypatch, number, kind):
    written = ShardFile.write(tmp_path / "f", SPECS, TENSORS.items())

    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(ModelError) as error:
        written.open(tmp_path / "f")
    assert type(error.value) is kind
    assert ("is damaged" in str(error.value)) == (kind is DamagedError)
