import os
import socket

import pytest
import torch.distributed as dist

from shardwise.config import ConfigError, DataError, ExportError, ModelError
from shardwise.engine.agreement import named_failures, raised_on_every_rank, written_on_every_rank


def fails(errors):
    """`errors` by rank; returns the class and text of what is raised, and that a collective afterwards still works."""
    result, is_shared = "nothing", True
    try:
        with raised_on_every_rank(ModelError, ConfigError):
            if error := errors[dist.get_rank()]:
                raise error
    except Exception as error:
        result, is_shared = f"{type(error).__name__}: {error}", isinstance(error, TypeError) or error.is_shared
    assert is_shared
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, result)
    return answers


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([None, None], ["nothing"] * 2),
        ([None, ModelError("x is cut")], ["ModelError: rank 1: x is cut"] * 2),
        ([OSError(28, "disk full"), None], ["ModelError: rank 0: OSError: [Errno 28] disk full"] * 2),
        ([ModelError("x is cut")] * 2, ["ModelError: x is cut"] * 2),
        ([None, ConfigError("y is 3")], ["ConfigError: rank 1: y is 3"] * 2),
        ([ConfigError("y is 3"), ModelError("x is cut")], ["ConfigError: y is 3"] * 2),
        ([None, DataError("no row")], ["ModelError: rank 1: no row"] * 2),
        ([None, TypeError("a bug")], ["ModelError: rank 1: TypeError: a bug", "TypeError: a bug"]),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_all_and_names_it(run_ranks, errors, expected):
    assert run_ranks(fails, 2, errors) == [expected] * 2


def fails_on_two_hosts(errors):
    """As `fails`, where torchrun has started one rank on each."""
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    try:
        return fails(errors)
    finally:
        del os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]


def test_the_host_of_the_rank_is_named_where_there_are_several(run_ranks):
    """Another one may have the file that is missing there."""
    told = f"ModelError: rank 1 on {socket.gethostname()}: x is cut"
    assert run_ranks(fails_on_two_hosts, 2, [None, ModelError("x is cut")]) == [[told] * 2] * 2


def test_a_long_message_is_cut_the_same_way_everywhere(run_ranks):
    (text, other), _ = run_ranks(fails, 2, [None, ModelError("ü" * 5000)])
    assert text == other == "ModelError: rank 1: " + "ü" * 2048


def test_without_a_process_group_errors_of_the_file_system_become_the_users():
    with pytest.raises(ExportError, match=r"^PermissionError: no$"), raised_on_every_rank(ExportError):
        raise PermissionError("no")
    with pytest.raises(KeyError), raised_on_every_rank(ExportError):
        raise KeyError("a bug")


def test_a_folder_that_is_gone_meanwhile_is_not_put_down_to_a_lack_of_space(tmp_path):
    told = rf"^{tmp_path} cannot be written: \[Errno 2\] .*; something has removed or moved it since, "
    with pytest.raises(ExportError, match=told), named_failures(tmp_path):
        (tmp_path / "gone" / "file").write_text("")


def writes(folder):
    try:
        with written_on_every_rank(folder):
            if dist.get_rank() == 1:
                raise OSError(28, "disk full")
    except ExportError as error:
        return str(error)
    return "nothing"


def test_what_one_rank_cannot_write_is_told_on_every_rank_with_its_folder(run_ranks, tmp_path):
    told = (
        f"rank 1: {tmp_path} cannot be written: [Errno 28] disk full; free space there, or choose a folder that every "
        "rank can write to"
    )
    assert run_ranks(writes, 2, tmp_path) == [told] * 2
