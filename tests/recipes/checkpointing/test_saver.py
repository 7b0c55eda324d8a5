import json
import threading
import time
from pathlib import Path

import pytest

from shardwise.config import ExportError, NotFiniteError, SFTConfig
from shardwise.controller.base import RankSilentError
from shardwise.controller.stall import StallLimit, watching_itself
from shardwise.controller.watchdog import own_activity
from shardwise.recipes.checkpointing.manifest import MANIFEST
from shardwise.recipes.checkpointing.retention import Reported
from shardwise.recipes.checkpointing.saver import Saver


class Writers:
    """What the ranks' CheckpointWriters do: waits where it is told to, fails where it is told to."""

    def __init__(self):
        self.may_write, self.errors = threading.Event(), {}
        self.may_write.set()

    def write(self, rank, checkpoint):
        assert self.may_write.wait(10)
        (Path(checkpoint) / f"weights_{rank}").write_text("w")
        return {"result": {"rank": rank}, "error": self.errors.get(rank, ""), "host": ""}


@pytest.fixture
def writers():
    return Writers()


@pytest.fixture
def make_saver(tmp_path, fake_group, remote, writers):
    def make(roles=("policy",), *, names_not_finite=(), **trainer):
        answers = {"nonfinite_tensors": lambda rank, _: names_not_finite if rank == 1 else []}
        good = {"result": {}, "error": "", "host": ""}
        group = fake_group(2, **answers)
        answers |= {"write": writers.write, "finish": lambda *_: good, "hash_files": lambda *_: good}
        group.background = fake_group(2, **answers)
        tree = {
            "model": {"path": "m"},
            "data": {"train_files": "t"},
            "trainer": {"output_dir": "o", "save_retries": 0, **trainer},
        }
        engines = {"" if role == "policy" else role: remote(group, role) for role in roles}
        return Saver(tmp_path, SFTConfig.parse(tree, origin="test"), engines, Reported(), files={}), group

    return make


def steps_in(folder):
    return {path.name for path in (folder / "checkpoints").glob("*step_*")}


def save_and_wait(saver, step):
    saver.save(step, {})
    saver.wait()


def test_training_waits_for_the_copies_alone(tmp_path, make_saver, writers):
    saver, group = make_saver(("policy", "critic"))
    writers.may_write.clear()
    parts = {"data": {"position": [1]}}
    saver.save(3, parts)
    assert [(call[0], call[1], call[-1]) for call in group.calls] == [
        ("stage_weights", "policy", ""),
        ("stage_weights", "critic", "critic"),
        ("stage_state", "policy", "state/policy"),
        ("stage_state", "critic", "state/critic"),
    ]
    assert group.background.calls[0] == ("clear",), "of an earlier run in this process"
    parts["data"]["position"].append(2)  # training goes on
    saver.check()
    assert saver.newest is None
    writers.may_write.set()
    saver.wait()
    folder = tmp_path / "checkpoints" / "step_3"
    assert (saver.newest.step, saver.newest.folder) == (3, folder)
    assert saver.newest.seconds > 0
    assert json.loads((folder / "state" / "run.json").read_text())["content"]["parts"] == {"data": {"position": [1]}}
    assert (folder / MANIFEST).is_file()
    assert (folder / "weights_1").is_file()
    written = [[{"rank": 0}, {"rank": 1}], None]
    assert ("finish", written, str(folder.with_name(".step_3.tmp"))) in group.background.calls


def test_f30_there_is_one_save_at_a_time(tmp_path, make_saver, writers):
    saver, _ = make_saver()
    writers.may_write.clear()
    saver.save(1, {})
    threading.Timer(0.2, writers.may_write.set).start()
    saver.save(2, {})
    assert (tmp_path / "checkpoints" / "step_1" / MANIFEST).is_file(), "the second has waited for the first"
    saver.wait()
    assert steps_in(tmp_path) == {"step_1", "step_2"}


def test_f30_trap_16_a_failure_is_reported_at_the_next_step_and_leaves_nothing(tmp_path, make_saver, writers):
    saver, _ = make_saver()
    saver.save(1, {})
    saver.wait()
    writers.errors[1] = "disk full"
    saver.save(2, {})
    saver._pending._thread.join()
    with pytest.raises(ExportError, match="rank 1: disk full"):
        saver.check()
    assert steps_in(tmp_path) == {"step_1"}
    writers.errors.clear()
    saver.save(3, {})
    saver.wait()
    assert steps_in(tmp_path) == {"step_1", "step_3"}


def test_a_save_that_hangs_ends_the_run_at_its_deadline_whatever_becomes_of_failed_ones(make_saver, writers, tmp_path):
    saver, _ = make_saver(save_timeout_seconds=0.2, on_save_error="continue")
    writers.may_write.clear()
    message = (
        rf"a save in the background was not done within 0\.2 s \(trainer\.save_timeout_seconds\).* of {tmp_path} .*; "
        "checkpoints that are whole stay: none was saved since this start$"
    )
    saver.save(3, {})
    saver.check()
    time.sleep(0.25)
    with pytest.raises(RankSilentError, match=message):
        saver.check()
    writers.may_write.set()
    saver, _ = make_saver(save_timeout_seconds=0.2)
    writers.may_write.clear()
    saver.save(4, {})
    with pytest.raises(RankSilentError, match=message):
        saver.finish()
    writers.may_write.set()


def test_rank_0_that_waits_for_a_save_has_the_saves_own_deadline_and_does_not_stall(make_saver, writers):
    saver, _ = make_saver(save_timeout_seconds=60)
    writers.may_write.clear()
    stalls = []
    saver.save(3, {})
    threading.Timer(1.0, writers.may_write.set).start()
    with watching_itself(StallLimit(0.3, "stall"), stalls.append):
        saver.finish()
    assert stalls == []
    assert own_activity().command == ""


def test_trap_16_without_async_save_the_ranks_write_at_once(tmp_path, make_saver):
    saver, group = make_saver(async_save=False, save_state=False)
    group._answers["hash_files"] = lambda *_: {}
    saver.save(1, {})
    assert group.methods == ["nonfinite_tensors", "save", "hash_files"]
    assert group.background.calls == []
    assert saver.newest.folder == tmp_path / "checkpoints" / "step_1"


def test_a_save_beside_training_is_tried_again_from_the_same_copies(tmp_path, make_saver, writers, monkeypatch):
    saver, group = make_saver(save_retries=1)
    writers.errors[1] = "disk full"
    monkeypatch.setattr(time, "sleep", lambda _: writers.errors.clear())
    saver.save(1, {})
    saver.finish()
    assert steps_in(tmp_path) == {"step_1"}
    assert group.methods.count("stage_weights") == 1
    attempts = ["nonfinite_tensors", "write", "nonfinite_tensors", "write"]
    assert group.background.methods == ["clear", *attempts, "finish", "hash_files"]


def test_f30_where_the_run_goes_on_a_failure_counts_and_the_last_one_ends_it(tmp_path, make_saver, writers, capsys):
    saver, _ = make_saver(on_save_error="continue")
    saver.save(1, {})
    saver.wait()
    writers.errors[1] = "disk full"
    saver.save(2, {})
    saver.wait()
    assert saver.num_failures == 1
    assert "warning: the checkpoint of step 2 was not saved: rank 1: disk full" in capsys.readouterr().err
    with pytest.raises(ExportError, match="all steps are done, but the checkpoint of step 2 was not saved"):
        saver.finish()
    writers.errors.clear()
    saver.save(3, {})
    saver.finish()
    assert (saver.num_failures, steps_in(tmp_path)) == (1, {"step_1", "step_3"})
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_3\n"


@pytest.mark.parametrize("async_save", [True, False])
def test_of_what_is_not_finite_no_byte_is_written(tmp_path, make_saver, async_save):
    saver, group = make_saver(names_not_finite=["lm_head.weight"], async_save=async_save, save_retries=1)
    with pytest.raises(NotFiniteError, match=r"step 4 was not saved: lm_head.weight of the policy hold NaN"):
        save_and_wait(saver, 4)
    if async_save:
        assert group.background.methods == ["clear", "nonfinite_tensors"]
    else:
        assert group.methods == ["nonfinite_tensors"]
    assert steps_in(tmp_path) == set()
    saver.finish()


def test_older_checkpoints_go_when_a_new_one_is_there(tmp_path, make_saver):
    saver, _ = make_saver(keep_last=1)
    for step in (1, 2, 3):
        saver.save(step, {})
        saver.wait()
        assert steps_in(tmp_path) == {f"step_{step}"}
