import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardwise.config import ConfigError, ModelError
from shardwise.engine.files.foreign import open_checkpoint
from shardwise.engine.files.foreign.dcp import DcpCheckpoint


def test_a_folder_is_opened_by_the_reader_of_its_files(tmp_path):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    assert isinstance(open_checkpoint(tmp_path / "dcp"), DcpCheckpoint)
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "model_world_size_2_rank_1.pt").write_bytes(b"")
    with pytest.raises(ModelError, match=r"actor lacks model_world_size_2_rank_0\.pt"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("is_there", "what"), [(False, "is no folder"), (True, "holds no checkpoint of another tr")])
def test_a_source_of_no_format_is_refused_and_all_formats_are_named(tmp_path, is_there, what):
    source = tmp_path / "source"
    if is_there:
        source.mkdir()
    with pytest.raises(ConfigError) as error:
        open_checkpoint(source)
    assert str(error.value).startswith(f"{source} {what}")
    assert str(error.value).endswith(
        "; give a folder with the .metadata file of torch.distributed.checkpoint, or with model_world_size_W_rank_R.pt "
        "files, which verl writes into global_step_N/actor"
    )
