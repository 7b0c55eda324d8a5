import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_checkpoints import Touch, pickled_attack, write_dcp

from shardwise.config import ConfigError, ModelError
from shardwise.engine.files.foreign import FoundWeights
from shardwise.engine.files.foreign.dcp import METADATA, DcpCheckpoint


@pytest.fixture(scope="module")
def saved(run_ranks, tmp_path_factory):
    """(folder, the model's tensors, AdamW's states), the model under app.model, a number beside it."""
    folder = tmp_path_factory.mktemp("dcp") / "step-3"
    tensors, states = run_ranks(write_dcp, 2, str(folder), "qwen3", ("model", "optim"), {})[0]
    return folder, tensors, states


@pytest.fixture
def copied(saved, tmp_path):
    return Path(shutil.copytree(saved[0], tmp_path / "step-3"))


def under(prefix):
    """Weights that were found there."""
    return FoundWeights(prefix, None, [])


def test_tensors_of_two_ranks_are_read_as_they_were_saved(saved):
    folder, tensors, _ = saved
    found = DcpCheckpoint.open(folder)
    assert found.num_files == 2
    assert "num_tokens" in found.others
    model = found.tensors.under("app.model.")
    assert model.specs.keys() == tensors.keys()
    assert model.num_bytes == sum(array.nbytes for array in tensors.values())
    assert any(len(tensor.pieces) == 2 for tensor in model.tensors.values())
    for name, array in tensors.items():
        assert torch.equal(model.read(name), torch.from_numpy(array)), name


def test_optimizer_states_are_found_by_the_parameters_names(saved):
    folder, tensors, expected = saved
    states = DcpCheckpoint.open(folder).optimizer_states(list(tensors), under("app.model."))
    assert states.keys() == expected.keys()
    for name, array in expected.items():
        assert torch.equal(states[name].read(), torch.from_numpy(array)), name


def test_a_folder_without_an_optimizer_has_no_states(tmp_path):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    found = DcpCheckpoint.open(tmp_path)
    assert found.tensors.read("w").tolist() == [1, 1, 1]
    assert found.optimizer_states(["w"], under("")) == {}


def refusal(folder):
    with pytest.raises(ModelError) as error:
        read_all(folder)
    return str(error.value)


def read_all(folder):
    found = DcpCheckpoint.open(folder)
    for name in found.tensors.tensors:
        found.tensors.read(name)


def test_an_attack_in_metadata_is_refused_and_does_not_run(copied, tmp_path):
    ran = tmp_path / "ran"
    (copied / METADATA).write_bytes(pickled_attack(ran))
    assert refusal(copied).startswith(f"{copied / METADATA} is refused: loading it would call posix.system, ")
    assert not ran.exists()
    pickle.loads((copied / METADATA).read_bytes())
    assert ran.exists()


def test_an_attack_in_a_shard_is_refused_and_does_not_run(saved, copied, tmp_path):
    """A tensor's bytes in the middle of the file make way for a pickle of the same length."""
    ran = tmp_path / "ran"
    path = copied / "__0_0.distcp"
    torch.save(Touch(ran), tmp_path / "attack")
    attack = (tmp_path / "attack").read_bytes()
    metadata = pickle.loads((copied / METADATA).read_bytes())
    info = next(info for info in metadata.storage_data.values() if info.relative_path == path.name)
    info.length = len(attack)
    path.write_bytes(path.read_bytes()[: info.offset] + attack + path.read_bytes()[info.offset + len(attack) :])
    (copied / METADATA).write_bytes(pickle.dumps(metadata))
    assert refusal(copied).startswith(f"{path} is refused: loading it would call posix.system, ")
    assert not ran.exists()


def test_missing_cut_and_foreign_files_are_named(copied):
    path = copied / "__1_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    assert f"{path} is cut: it has {len(data) - 100} bytes and should have {len(data)}; copy it again" == refusal(
        copied
    )
    path.unlink()
    assert f"{copied} lacks __1_0.distcp, which .metadata names; every rank writes a file, on its" in refusal(copied)
    metadata = (copied / METADATA).read_bytes()
    (copied / METADATA).write_bytes(metadata[:-50])
    assert f"{copied / METADATA} cannot be read: " in refusal(copied)
    (copied / METADATA).write_bytes(pickle.dumps({"a": 1}))
    assert f"{copied / METADATA} is not what torch.distributed.checkpoint writes (AttributeError: " in refusal(copied)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd"])
def test_files_outside_of_the_folder_are_not_read(copied, name):
    metadata = pickle.loads((copied / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (copied.parent / "secret").write_bytes(b"x")
    (copied / METADATA).write_bytes(pickle.dumps(metadata))
    assert f"{copied} lacks {name}, which .metadata names" in refusal(copied)


def test_metadata_that_does_not_fit_the_files_is_refused(copied):
    metadata = pickle.loads((copied / METADATA).read_bytes())
    entry = metadata.state_dict_metadata["app.model.model.norm.weight"]
    entry.properties.dtype = torch.bfloat16
    (copied / METADATA).write_bytes(pickle.dumps(metadata))
    assert "holds float32 [16] where .metadata says that app.model.model.norm.weight is bfloat16 [16]" in refusal(
        copied
    )
    entry.chunks.pop()
    (copied / METADATA).write_bytes(pickle.dumps(metadata))
    assert "the ranks hold 16 of the 32 elements of app.model.model.norm.weight [32]" in refusal(copied)


def test_two_optimizers_are_not_guessed_between(tmp_path):
    dcp.save({"a.w.exp_avg": torch.ones(3), "b.w.exp_avg": torch.ones(3)}, checkpoint_id=tmp_path)
    with pytest.raises(ConfigError, match=r"under 'a\.', 'b\.'"):
        DcpCheckpoint.open(tmp_path).optimizer_states(["w"], under(""))


@pytest.mark.parametrize(("prefix", "value"), [("app.actor.model.", 1.0), ("app.ema.model.", 2.0)])
def test_of_two_optimizers_that_beside_the_weights_is_theirs(tmp_path, prefix, value):
    states = {
        f"app.{name}.optim.w.exp_avg": torch.full((3,), number) for name, number in (("actor", 1.0), ("ema", 2.0))
    }
    dcp.save(states, checkpoint_id=tmp_path)
    (state,) = DcpCheckpoint.open(tmp_path).optimizer_states(["w"], under(prefix)).values()
    assert state.read().tolist() == [value] * 3
