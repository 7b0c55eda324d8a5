import pytest

from shardwise.config import ExportError
from shardwise.recipes.checkpointing.engine_files import LiveEngines, StagedEngines


@pytest.fixture
def engines(fake_group, remote):
    """The policy and the critic of two ranks, whose hashes tell the ranks apart."""
    group = fake_group(2, hash_files=lambda rank, share, _: {"rank": rank, "share": share})
    return {"": remote(group), "critic": remote(group, "critic")}


def arguments(group, method):
    return [call[1:] for call in group.calls if call[0] == method]


SHARES = [{"rank": 0, "share": ["a", "c"]}, {"rank": 1, "share": ["b"]}]
"""What two ranks answer where rank 0 has found the files a, b and c."""


def touch_files(folder):
    for name in "abc":
        (folder / name).touch()


def test_live_engines_write_weights_and_states_into_their_folders(tmp_path, engines):
    files = LiveEngines(engines, with_state=True)
    files.write(tmp_path)
    touch_files(tmp_path)
    assert files.hash_shares(tmp_path) == SHARES
    assert files.group is engines[""].group
    model = engines[""].source.model.model_dump_json()
    assert arguments(files.group, "save") == [
        ("policy", model, str(tmp_path), str(tmp_path / "state" / "policy")),
        ("critic", model, str(tmp_path / "critic"), str(tmp_path / "state" / "critic")),
    ]


def test_live_engines_write_no_state_that_is_not_saved(tmp_path, engines):
    LiveEngines(engines, with_state=False).write(tmp_path)
    assert [call[-1] for call in arguments(engines[""].group, "save")] == ["", ""]


def test_staged_engines_are_copied_once_and_written_by_the_writers(tmp_path, engines, fake_group):
    answers = {"write": lambda rank, _: outcome(rank), "finish": lambda *_: outcome({})}
    writers = fake_group(2, **answers, hash_files=lambda rank, share, _: outcome({"rank": rank, "share": share}))
    files = StagedEngines(engines, writers, with_state=False)
    for _ in range(2):
        files.write(tmp_path)
    touch_files(tmp_path)
    assert files.hash_shares(tmp_path) == SHARES
    assert engines[""].group.methods == ["stage_weights", "stage_weights"]
    assert writers.methods == ["clear", "write", "finish", "write", "finish", "hash_files"]
    assert arguments(writers, "finish")[0] == ([[0, 1], None], str(tmp_path)), "rank 0 alone is told what all wrote"


@pytest.mark.parametrize(
    ("size", "host", "message"),
    [(1, "", "^disk full$"), (2, "", "^rank 1: disk full$"), (2, " on b", "^rank 1 on b: disk full$")],
)
def test_an_error_of_a_writer_names_its_rank_and_host_where_there_are_several(
    tmp_path, engines, fake_group, size, host, message
):
    def write(rank, _):
        return outcome({}, "disk full" if rank == size - 1 else "", host)

    files = StagedEngines(engines, fake_group(size, write=write), with_state=True)
    with pytest.raises(ExportError, match=message):
        files.write(tmp_path)


def outcome(result, error="", host=""):
    return {"result": result, "error": error, "host": host}
