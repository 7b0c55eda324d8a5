import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.config import DataError, Split
from shardwise.controller.base import RankStalledError
from shardwise.controller.launch import launch
from shardwise.fault_plan import plan
from shardwise.recipes.rank import process
from shardwise.recipes.rank.process import run_rank
from shardwise.recipes.rank.worker import Worker
from shardwise.recipes.stopping import Stopped


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SHARDWISE_JOB_FOLDER", "SHARDWISE_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)


def test_a_recipe_runs_inside_the_process_group_with_a_worker_and_leaves_it():
    seen = []

    def recipe(group):
        seen.append((group.size, type(group._worker), dist.get_world_size(), dist.get_backend()))

    assert run_rank(recipe, timeout_seconds=7) == 0
    assert seen == [(1, Worker, 1, "gloo")]
    assert not dist.is_initialized()


FEW_OPEN_FILES = """
import os, resource, sys
sys.path.insert(0, sys.argv[1])
from shardwise.recipes.rank.process import run_rank

num_open = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 8, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sys.exit(run_rank(lambda group: print("met", group.size), timeout_seconds=20))
"""


def test_ranks_open_as_many_connections_as_they_need_whatever_the_soft_limit(tmp_path, capfd):
    script = tmp_path / "rank.py"
    script.write_text(FEW_OPEN_FILES)
    assert launch([sys.executable, str(script), str(Path(__file__).parents[3])], nproc=2) == 0
    assert capfd.readouterr().out == "met 2\n"


@pytest.mark.parametrize(
    ("error", "code", "last_line", "has_traceback"),
    [
        (DataError("train.jsonl line 3: broken"), 2, "error: train.jsonl line 3: broken", False),
        (IndexError("list index out of range"), 1, "error: list index out of range", True),
        (KeyError(), 1, "error: KeyError", True),
        (SystemExit(0), 1, "error: something called sys.exit(0), which ends no run; raise an error instead", True),
    ],
)
def test_an_error_becomes_an_exit_code_and_the_group_is_left(capsys, error, code, last_line, has_traceback):
    def recipe(group):
        raise error

    assert run_rank(recipe, timeout_seconds=7) == code
    stderr = capsys.readouterr().err
    assert stderr.splitlines()[-1] == last_line
    assert ("Traceback" in stderr) == has_traceback
    assert not dist.is_initialized()


def test_a_run_that_was_stopped_ends_with_its_code_and_lets_the_other_ranks_go(capsys, monkeypatch):
    ended = []
    monkeypatch.setattr(process.RankGroup, "shutdown", lambda group: ended.append(group))

    def recipe(group):
        raise Stopped("stopped", "resumable", 143)

    assert run_rank(recipe, timeout_seconds=7) == 143
    assert capsys.readouterr() == ("stopped; resumable\n", "")
    assert len(ended) == 1


def test_a_failure_is_noted_before_the_connections_close(monkeypatch):
    """Closing them first would let the other ranks report a lost peer before the cause is written down."""
    noted = []
    monkeypatch.setattr(
        "shardwise.recipes.rank.process.note_failure", lambda error, rank: noted.append(dist.is_initialized()) or 1
    )

    def recipe(group):
        raise IndexError

    assert run_rank(recipe, timeout_seconds=7) == 1
    assert noted == [True]


def test_the_faults_of_a_config_are_planned_and_a_mistake_in_the_variable_is_one_of_the_user(monkeypatch, capsys):
    planned = []
    assert run_rank(lambda _: planned.append(plan()), timeout_seconds=7, faults=["phase=optim action=raise"]) == 0
    with pytest.raises(RuntimeError, match="raises in phase optim"):
        planned[0].enter("optim")
    monkeypatch.setenv("SHARDWISE_FAULTS", "phase=optin")
    assert run_rank(lambda _: None, timeout_seconds=7) == 2
    assert "SHARDWISE_FAULTS: 'phase=optin' has phase=optin; choose one of rollout," in capsys.readouterr().err
    plan.cache_clear()


def test_ranks_that_only_sample_need_others_that_train(capsys):
    assert run_rank(lambda group: None, timeout_seconds=7, split=Split()) == 2
    assert "rollout.placement.num_ranks=1 leaves none of the job's 1 ranks to train" in capsys.readouterr().err


def test_a_rank_that_hangs_when_another_is_gone_ends_after_a_grace_and_is_told_to_hang(monkeypatch):
    """The thread in the background hears of it; the main thread, which would too, is where nothing tells it."""
    noted, codes, ended = [], [], threading.Event()
    monkeypatch.setattr(process, "_NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(process.os, "_exit", lambda code: (codes.append(code), ended.set()))
    process._end(lambda error: noted.append(error) or 7, RuntimeError("Connection closed by peer\n[10.0.0.1]:9"))
    assert not ended.wait(0.05)
    assert ended.wait(5)
    assert codes == [7]
    (error,) = noted
    assert isinstance(error, RankStalledError)
    assert str(error).startswith(
        "another rank is gone (Connection closed by peer [10.0.0.1]:9), and it has not noticed"
    )


def test_another_failure_in_the_background_ends_a_rank_at_once(monkeypatch):
    codes = []
    monkeypatch.setattr(process.os, "_exit", codes.append)
    process._end(lambda error: 2, DataError("train.jsonl line 3: broken"))
    assert codes == [2]
