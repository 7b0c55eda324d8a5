import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from foreign_checkpoints import Touch, whole, write_verl
from tiny_models import tiny_model

from shardwise.config import ModelError
from shardwise.engine.files.foreign import FoundWeights
from shardwise.engine.files.foreign.verl import VerlCheckpoint

ALL = FoundWeights("", None, [])
"""Weights of files that hold nothing else."""


@pytest.fixture(scope="module")
def of_two(run_ranks, tmp_path_factory):
    """(folder, tensors, AdamW's states) of a tied Qwen3 after some updates; 131 rows do not divide by 2."""
    folder = tmp_path_factory.mktemp("verl") / "global_step_3" / "actor"
    tensors, states = run_ranks(write_verl, 2, str(folder), "qwen3", {"fsdp": 2}, True, {})[0]
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))
    return folder, tensors, states


@pytest.fixture
def copied(of_two, tmp_path):
    return Path(shutil.copytree(of_two[0], tmp_path / "actor"))


def assert_equal(found, expected):
    assert found.specs.keys() == expected.keys()
    for name, array in expected.items():
        assert torch.equal(found.read(name), torch.from_numpy(array)), name


def test_shards_of_fsdp2_make_up_the_model(of_two):
    folder, tensors, _ = of_two
    assert VerlCheckpoint.find(folder.parent) == VerlCheckpoint.find(folder) == folder
    found = VerlCheckpoint.open(folder)
    assert (found.world_size, found.mesh, found.fsdp_version, found.has("optim")) == (2, {"fsdp": 2}, 2, True)
    assert "lm_head.weight" in tensors
    assert not torch.equal(torch.from_numpy(tensors["model.norm.weight"]), tiny_model("qwen3").model.norm.weight)
    assert_equal(found.tensors, tensors)


@pytest.mark.parametrize("axes", [{"ddp": 2, "fsdp": 2}, {"fsdp": 4}], ids=["2 x 2", "4"])
def test_four_ranks_with_replicas_or_with_ranks_that_hold_no_rows(run_ranks, tmp_path, axes):
    """The tiny Llama's keys have 2 rows: of 4 ranks two hold nothing."""
    tensors, _ = run_ranks(write_verl, 4, str(tmp_path), "llama", axes, False, {})[0]
    found = VerlCheckpoint.open(tmp_path)
    assert (found.world_size, found.mesh, found.fsdp_version, found.has("optim")) == (4, axes, None, False)
    assert_equal(found.tensors, tensors)


def write_fsdp1(folder, with_mesh):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    expected = whole(tiny_model("qwen3"))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)) if with_mesh else None
    model = FullyShardedDataParallel(tiny_model("qwen3"), device_id=torch.device("cpu"), device_mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    name = f"world_size_2_rank_{dist.get_rank()}.pt"
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        torch.save(model.state_dict(), f"{folder}/model_{name}")
        torch.save(optimizer.state_dict(), f"{folder}/optim_{name}")
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        full = model.state_dict()
    assert any(not torch.equal(full[key], torch.from_numpy(array)) for key, array in expected.items())
    return {key: tensor.numpy() for key, tensor in full.items()}


@pytest.mark.parametrize("with_mesh", [True, False], ids=["DTensor", "ShardedTensor"])
def test_fsdp1_makes_up_the_model_and_its_flattened_optimizer_is_refused(run_ranks, tmp_path, with_mesh):
    tensors = run_ranks(write_fsdp1, 2, str(tmp_path), with_mesh)[0]
    found = VerlCheckpoint.open(tmp_path)
    assert_equal(found.tensors, tensors)
    with pytest.raises(
        ModelError, match=r"optim_world_size_2_rank_0\.pt does not hold AdamW's states for 25 param.*FSDP1"
    ):
        found.optimizer_states(list(tensors), ALL)


def write_fsdp1_with_a_shard_that_is(folder, change):
    """Rank 1's files, and in them another shard of one weight than their metadata say."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = FullyShardedDataParallel(tiny_model("qwen3"), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
        if dist.get_rank() == 1:
            (shard,) = state["model.layers.0.mlp.up_proj.weight"].local_shards()
            held = shard.tensor
            shard.tensor = {"fewer rows": held[:3], "one row": held[:1], "another dtype": held.double()}[change].clone()
        torch.save(state, f"{folder}/model_world_size_2_rank_{dist.get_rank()}.pt")


@pytest.mark.parametrize("change", ["fewer rows", "one row", "another dtype"])
def test_a_shard_of_fsdp1_that_is_not_what_its_metadata_say_is_refused(run_ranks, tmp_path, change):
    """One row would be written to every place."""
    run_ranks(write_fsdp1_with_a_shard_that_is, 2, str(tmp_path), change)
    found = refusal(tmp_path)
    assert "rank_1.pt: model.layers.0.mlp.up_proj.weight is float" in found
    assert ", and by its metadata it should be float32 [" in found


def test_optimizers_with_several_groups_are_refused(copied, of_two):
    """torch numbers their parameters group by group, which need not be the order of the modules."""
    names = [name for name in of_two[1] if name != "lm_head.weight"]
    for rank in (0, 1):
        file = rank_file(copied, rank, "optim")
        content = torch.load(file, weights_only=False)
        (group,) = content["param_groups"]
        content["param_groups"] = [group | {"params": group["params"][:9]}, group | {"params": group["params"][9:]}]
        torch.save(content, file)
    with pytest.raises(ModelError, match=r"optim_world_size_2_rank_0\.pt has 2 parameter groups"):
        VerlCheckpoint.open(copied).optimizer_states(names, ALL)


def test_optimizer_states_are_found_by_the_order_of_the_parameters(of_two):
    folder, tensors, expected = of_two
    found = VerlCheckpoint.open(folder)
    states = found.optimizer_states([name for name in tensors if name != "lm_head.weight"], ALL)
    assert states.keys() == expected.keys()
    assert len(expected) == 3 * 24
    for name, array in expected.items():
        assert torch.equal(states[name].read(), torch.from_numpy(array)), name
    with pytest.raises(ModelError, match=r"does not hold AdamW's states for 25 parameters"):
        found.optimizer_states(list(tensors), ALL)


def rank_file(folder, rank, part="model"):
    return folder / f"{part}_world_size_2_rank_{rank}.pt"


def refusal(folder):
    with pytest.raises(ModelError) as error:
        VerlCheckpoint.open(folder)
    return str(error.value)


def test_files_that_are_missing_or_of_several_saves_are_named(copied):
    shutil.copy(rank_file(copied, 1), copied / "model_world_size_3_rank_1.pt")
    assert "holds model files of the world sizes 2 and 3, so of different saves; move those" in refusal(copied)
    (copied / "model_world_size_3_rank_1.pt").unlink()
    rank_file(copied, 1).rename(copied / "x")
    assert refusal(copied) == (
        f"{copied} lacks model_world_size_2_rank_1.pt; every rank writes a file, on its own node: copy all of them"
    )
    shutil.copy(rank_file(copied, 0), rank_file(copied, 1))
    assert "holds files of 2 ranks, and by what is in them their mesh is 1; bring back the files of one" in refusal(
        copied
    )


def test_names_and_fsdp_config_have_to_agree_with_what_is_in_the_files(copied):
    (copied / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 8}')
    assert "fsdp_config.json says world_size 8, and the files' names say 2; bring back" in refusal(copied)
    (copied / "fsdp_config.json").write_text("{")
    assert "fsdp_config.json is not JSON: " in refusal(copied)
    (copied / "fsdp_config.json").unlink()
    rank_file(copied, 1).unlink()
    rank_file(copied, 0).rename(copied / "model_world_size_1_rank_0.pt")
    assert "is float32 [66, 32], and among 1 ranks this one should hold [131, 32] of [131, 32]; bring" in refusal(
        copied
    )


def test_a_swapped_pair_of_files_is_still_read_by_the_places_inside(copied, of_two):
    rank_file(copied, 0).rename(copied / "x")
    rank_file(copied, 1).rename(rank_file(copied, 0))
    (copied / "x").rename(rank_file(copied, 1))
    assert_equal(VerlCheckpoint.open(copied).tensors, of_two[1])


def test_ranks_that_hold_different_tensors_are_refused(copied):
    state = torch.load(rank_file(copied, 1), weights_only=False)
    state["extra"] = state.pop("lm_head.weight")
    torch.save(state, rank_file(copied, 1))
    assert "rank_1.pt and model_world_size_2_rank_0.pt hold different tensors (extra, lm_head.weight)" in refusal(
        copied
    )
    torch.save([1], rank_file(copied, 1))
    assert "rank_1.pt does not hold a state dict" in refusal(copied)
    torch.save(dict.fromkeys(state, 3), rank_file(copied, 1))
    torch.save(dict.fromkeys(state, 3), rank_file(copied, 0))
    assert "is neither a tensor nor a shard of one" in refusal(copied)


def test_an_attack_in_a_ranks_file_is_refused_and_does_not_run(copied, tmp_path):
    ran = tmp_path / "ran"
    state = torch.load(rank_file(copied, 1), weights_only=False)
    state["model.norm.weight"] = Touch(ran)
    torch.save(state, rank_file(copied, 1))
    assert refusal(copied).startswith(f"{rank_file(copied, 1)} is refused: loading it would call posix.system, ")
    torch.save(Touch(ran), rank_file(copied, 0, "optim"))
    shutil.copy(rank_file(copied, 0), rank_file(copied, 1))
    with pytest.raises(ModelError, match=r"optim_world_size_2_rank_0\.pt is refused: .*posix\.system"):
        VerlCheckpoint(copied, 2, {"fsdp": 2}, None, None).optimizer_states(["a"], ALL)
    assert not ran.exists()
    torch.load(rank_file(copied, 0, "optim"), weights_only=False)
    assert ran.exists()


def test_a_cut_file_is_named(copied):
    data = rank_file(copied, 1).read_bytes()
    rank_file(copied, 1).write_bytes(data[: len(data) // 2])
    assert f"{rank_file(copied, 1)} cannot be read as a file of torch.save: " in refusal(copied)


def test_the_names_that_older_versions_of_torch_pickle_are_known(copied, of_two):
    older = {
        b"ctorch.distributed.tensor\nDTensor\n": b"ctorch.distributed._tensor.api\nDTensor\n",
        b"ctorch.distributed.tensor.placement_types\n": b"ctorch.distributed._tensor.placement_types\n",
        b"d.tensor._dtensor_spec\nDTensorSpec": b"d._tensor.placement_types\nDTensorSpec",
        b"d.tensor._dtensor_spec\nTensorMeta": b"d._tensor.placement_types\nTensorMeta",
        b"\x0f\x00\x00\x00_mesh_dim_names": b"\x0e\x00\x00\x00mesh_dim_names",
    }
    for rank in (0, 1):
        with zipfile.ZipFile(rank_file(copied, rank)) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        (pickled,) = (name for name in entries if name.endswith("data.pkl"))
        for new, old in older.items():
            assert new in entries[pickled]
            entries[pickled] = entries[pickled].replace(new, old)
        with zipfile.ZipFile(rank_file(copied, rank), "w") as archive:
            for name, data in entries.items():
                archive.writestr(name, data)
    found = VerlCheckpoint.open(copied)
    assert found.mesh == {"fsdp": 2}
    assert_equal(found.tensors, of_two[1])


def test_tensor_parallel_shards_are_refused_by_name(copied):
    for rank in (0, 1):
        with zipfile.ZipFile(rank_file(copied, rank)) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(rank_file(copied, rank), "w") as archive:
            for name, data in entries.items():
                archive.writestr(name, data.replace(b"placement_types\nShard\n", b"placement_types\n_StridedShard\n"))
    assert "model.embed_tokens.weight has the placement _StridedShard, which FSDP alone does not make" in refusal(
        copied
    )
