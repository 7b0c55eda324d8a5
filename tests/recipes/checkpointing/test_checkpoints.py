import pytest

from shardwise.config import ModelError
from shardwise.recipes.checkpointing.checkpoints import latest_hf_folder, reading


def test_the_checkpoint_with_the_highest_step_is_found_by_number_not_by_name(tmp_path):
    for step in (9, 100, 20):
        (tmp_path / "checkpoints" / f"step_{step}" / "hf").mkdir(parents=True)
    assert latest_hf_folder(str(tmp_path)) == str(tmp_path / "checkpoints" / "step_100" / "hf")


def test_unfinished_and_foreign_folders_do_not_count(tmp_path):
    """An export is written as .hf.partial and renamed when it is whole."""
    for name in ("step_9/.hf.partial", "step_8.old/hf", "step_x/hf", "step_7/other", "step_3/hf"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert latest_hf_folder(str(tmp_path)) == str(tmp_path / "checkpoints" / "step_3" / "hf")


def test_a_checkpoint_itself_is_taken(tmp_path, monkeypatch):
    for step in (9, 20):
        (tmp_path / "checkpoints" / f"step_{step}" / "hf").mkdir(parents=True)
    earlier = tmp_path / "checkpoints" / "step_9"
    assert latest_hf_folder(str(earlier)) == str(earlier / "hf")
    monkeypatch.chdir(earlier)
    assert latest_hf_folder(".") == "hf"
    model = tmp_path / "step_5"
    (model / "adapter").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    assert latest_hf_folder(str(model)) == str(model), "a model of that name"
    run = tmp_path / "step_1"
    (run / "checkpoints" / "step_4" / "hf").mkdir(parents=True)
    assert latest_hf_folder(str(run)) == str(run / "checkpoints" / "step_4" / "hf"), "a run of that name"


def test_anything_else_is_taken_as_it_is(tmp_path):
    assert latest_hf_folder(str(tmp_path)) == str(tmp_path)
    assert latest_hf_folder("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_folders_of_runs_without_weights_are_told_from_models(tmp_path):
    run = tmp_path / "runs" / "first"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(ModelError, match=f"{run} is a run that has saved no checkpoint yet; wait for the first"):
        latest_hf_folder(str(run))
    (run / "checkpoints" / "step_2" / "hf").mkdir(parents=True)
    assert latest_hf_folder(str(run)) == str(run / "checkpoints" / "step_2" / "hf")
    with pytest.raises(ModelError, match=f"checkpoints holds the checkpoints of a run; name the run, {run}, or one"):
        latest_hf_folder(str(run / "checkpoints"))
    with pytest.raises(ModelError, match=f"{tmp_path / 'runs'} holds runs; name one, such as {run}"):
        latest_hf_folder(str(tmp_path / "runs"))


@pytest.mark.parametrize("part", ["hf", "adapter", "critic/hf"])
def test_weights_that_a_run_removes_are_told_as_that_and_others_as_what_went_wrong(tmp_path, part):
    weights = tmp_path / "run" / "checkpoints" / "step_3" / part
    weights.mkdir(parents=True)
    own, copy = tmp_path / "model", tmp_path / "step_3" / part
    told = f"{weights} was removed .*; start again with {tmp_path / 'run'}, of which the newest is read"
    for folder, error, message in (
        (weights, ModelError, told),
        (own, FileNotFoundError, "No such file"),
        (copy, FileNotFoundError, "No such file"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        with pytest.raises(FileNotFoundError), reading(folder):
            (folder / "config.json").read_text()
        with pytest.raises(error, match=message), reading(folder):
            (folder.rmdir(), (folder / "config.json").read_text())
        with pytest.raises(FileNotFoundError), reading(folder):  # it was never there
            (folder / "config.json").read_text()
