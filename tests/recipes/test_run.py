import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml

from shardwise.config import (
    ConfigError,
    DistillConfig,
    ExportError,
    ModelConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from shardwise.controller.base import RankSilentError
from shardwise.observability import LogFile
from shardwise.recipes import distill, preference, reward_model, rl, sft
from shardwise.recipes.checkpointing.manifest import write_manifest
from shardwise.recipes.checkpointing.resume import write_run
from shardwise.recipes.run import Run, is_finished
from shardwise.recipes.stopping import Stopped
from shardwise.types import MetricValue


def config(output_dir, **trainer) -> SFTConfig:
    tree = {
        "model": {"path": "m"},
        "data": {"train_files": "t.jsonl"},
        "trainer": {"output_dir": str(output_dir), "tensorboard": False, **trainer},
    }
    return SFTConfig.parse(tree, origin="test")


class Counter:
    """A part of a recipe that keeps a number."""

    def __init__(self):
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def save(_rank, _role, _model, *folders):
    """What is left of weights, and of a state."""
    for folder in filter(None, folders):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "weights").write_text("w")


@pytest.fixture
def run_of(fake_group, remote):
    def make(output_dir, group=None, *, roles=("policy",), frozen=(), total_steps=5, counter=None, **trainer) -> Run:
        whole = config(output_dir, **trainer)
        group = group or group_of(fake_group)
        engines = {"" if role == "policy" else role: remote(group, role) for role in roles}
        parts = {"counter": counter or Counter()}
        return Run(whole, parts=parts, engines=engines, frozen=frozen, total_steps=total_steps)

    return make


def group_of(fake_group, size=1):
    return fake_group(size, nonfinite_tensors=lambda *_: [], save=save, hash_files=lambda *_: {})


def steps_saved(run):
    return {path.name for path in (run / "checkpoints").glob("step_*")}


def run_to(run, last_step):
    """Reports the steps of a run up to one of them, as a process that dies in the step after does."""
    with run:
        for step in run.steps():
            if step > last_step:
                break
            run.report(step, {"train/loss": MetricValue.sum(float(step))}, num_tokens=1)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_every_model_read_is_in_the_first_row_of_performance_alone(tmp_path, fake_group, run_of, remote):
    """Not among metrics: it depends on the layout."""
    group = group_of(fake_group)
    frozen = [remote(group, "reference"), remote(group, "teacher")]
    run_to(run_of(tmp_path, group, roles=("policy", "critic"), frozen=frozen), 2)
    first, second = lines(tmp_path / "performance.jsonl")
    assert first["load/bytes_read"] == 400, "a hundred of each"
    assert "load/bytes_read" not in second
    assert all("load/bytes_read" not in row for row in lines(tmp_path / "metrics.jsonl"))


def test_files_of_a_run_hold_what_was_reported(tmp_path, fake_group, run_of, capsys):
    group = group_of(fake_group)
    with run_of(tmp_path, group, save_every_steps=2, validate_every_steps=3) as run:
        validated = []
        for step in run.steps():
            with run.spans("train"):
                pass
            if run.should_validate(step):
                validated.append(step)
            run.report(step, {"train/loss": MetricValue.mean(6.0 / step, 2)}, num_tokens=100)
    assert [(row["step"], row["train/loss"]) for row in lines(tmp_path / "metrics.jsonl")] == [
        (step, pytest.approx(3.0 / step)) for step in range(1, 6)
    ]
    performance = lines(tmp_path / "performance.jsonl")
    assert [row.get("save/step") for row in performance] == [None, None, 2, 2, 4]
    assert all(row["save/seconds"] > 0 for row in performance[2:])
    for row in performance:
        assert row["tokens_per_second"] * row["seconds/step"] == pytest.approx(100)
        assert row["seconds/train"] <= row["seconds/step"]
    assert validated == [3, 5]
    model = ModelConfig(path="m").model_dump_json()
    staged = {step: str(tmp_path / "checkpoints" / f".step_{step}.tmp") for step in (2, 4, 5)}
    assert group.calls == [
        call
        for folder in staged.values()
        for call in (
            ("nonfinite_tensors", "policy"),
            ("save", "policy", model, folder, f"{folder}/state/policy"),
            ("hash_files", [["state/policy/weights", "state/run.json", "weights"]], folder),
        )
    ]
    assert steps_saved(tmp_path) == {f"step_{step}" for step in staged}
    written = SFTConfig.parse(yaml.safe_load((tmp_path / "config.yaml").read_text()), origin="config.yaml")
    assert written == config(tmp_path, save_every_steps=2, validate_every_steps=3)
    printed = capsys.readouterr().out
    assert re.search(r"step 5/5 .* saved step 4\n", printed)
    assert printed.startswith(f"sft: 7.0M parameters (0.50M trained) on 1 rank, 5 steps, into {tmp_path}\n")
    assert printed.endswith(f"sft: saved {tmp_path / 'checkpoints' / 'step_5'}\n")


@pytest.mark.parametrize(("num_sampling", "said"), [(1, "1 sampling rank"), (2, "2 sampling ranks")])
def test_ranks_that_only_sample_are_told_apart(tmp_path, fake_group, remote, capsys, num_sampling, said):
    tree = {
        "model": {"path": "m"},
        "data": {"train_files": "t.jsonl"},
        "reward": {"functions": "a:b"},
        "rollout": {"placement": {"type": "split", "num_ranks": num_sampling}},
        "trainer": {"output_dir": str(tmp_path), "tensorboard": False},
    }
    whole = RLConfig.parse(tree, origin="test")
    group = fake_group(2, sees=lambda *_: None)
    with Run(whole, parts={}, engines={"": remote(group)}, total_steps=5):
        pass
    assert capsys.readouterr().out.startswith(f"rl: 7.0M parameters (0.50M trained) on 2 ranks and {said}, 5 steps, ")


def test_a_mean_over_nothing_is_left_out_and_no_unknown_metric(tmp_path, run_of):
    """A step without one does not say that it was 0, which might be the best of all."""
    best = {"metric": "reward/mean", "mode": "max"}
    with run_of(tmp_path, total_steps=2, save_every_steps=1, keep_last=1, keep_best=best) as run:
        for step in run.steps():
            reward = MetricValue.mean(0.0, 0) if step == 1 else MetricValue.mean(-3.0, 2)
            run.report(step, {"reward/mean": reward, "reward/failed": MetricValue.mean(2.0, 2)}, num_tokens=100)
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward/failed": 1.0},
        {"step": 2, "reward/failed": 1.0, "reward/mean": -1.5},
    ]


def test_a_slow_rank_is_told_in_the_line_of_its_step_and_among_the_timings(tmp_path, fake_group, run_of, capsys):
    with run_of(tmp_path, group_of(fake_group)) as run:
        for step in run.steps():
            busy = {f"train/busy/forward/rank_{rank}": MetricValue.sum(1.0 + 2 * rank) for rank in (0, 1)}
            run.report(step, {"train/loss": MetricValue.mean(1.0, 1)} | busy, num_tokens=100)
    assert all(set(row) == {"step", "train/loss"} for row in lines(tmp_path / "metrics.jsonl"))
    for row in lines(tmp_path / "performance.jsonl"):
        assert (row["train/forward_slowest_rank"], row["train/forward_imbalance"]) == (1, 3)
    assert "train/loss 1  rank 1 slower by a factor of 3\n" in capsys.readouterr().out


def test_a_checkpoint_holds_every_engine_in_a_folder_of_its_own(tmp_path, fake_group, run_of):
    group = group_of(fake_group, 2)
    with run_of(tmp_path, group, roles=("policy", "critic"), save_every_steps=3) as run:
        list(run.steps())
    for step in (3, 5):
        staged = tmp_path / "checkpoints" / f".step_{step}.tmp"
        shares = [["critic/weights", "state/policy/weights", "weights"], ["state/critic/weights", "state/run.json"]]
        model = ModelConfig(path="m").model_dump_json()
        assert [call for call in group.calls if call[-1].startswith(str(staged))] == [
            ("save", "policy", model, str(staged), str(staged / "state" / "policy")),
            ("save", "critic", model, str(staged / "critic"), str(staged / "state" / "critic")),
            ("hash_files", shares, str(staged)),
        ]


def test_zero_means_only_at_the_end(tmp_path, fake_group, run_of):
    group = group_of(fake_group)
    with run_of(tmp_path, group) as run:
        assert [step for step in run.steps() if run.should_validate(step)] == [5]
    assert group.methods == ["nonfinite_tensors", "save", "hash_files"]
    assert steps_saved(tmp_path) == {"step_5"}


def test_an_earlier_run_in_the_folder_is_moved_aside_whole(tmp_path, run_of):
    for value in (1.0, 2.0):
        with run_of(tmp_path, total_steps=1, resume="never") as run:
            for step in run.steps():
                for name in ("checkpoints", "nonfinite"):
                    (tmp_path / name).mkdir(exist_ok=True)
                    (tmp_path / name / "mark").write_text(str(value))
                run.report(step, {"train/loss": MetricValue.sum(value)}, num_tokens=1)
    assert lines(tmp_path / "metrics.jsonl")[0]["train/loss"] == 2.0
    assert lines(tmp_path / "metrics.jsonl.1")[0]["train/loss"] == 1.0
    for name in ("checkpoints", "nonfinite"):
        assert (tmp_path / name / "mark").read_text() == "2.0"
        assert (tmp_path / f"{name}.1" / "mark").read_text() == "1.0"


@pytest.mark.parametrize("inside", [True, False], ids=["of this run", "of another run"])
def test_checkpoints_that_a_named_path_moves_aside_are_named_and_can_be_gone_on_from(tmp_path, run_of, capsys, inside):
    """Once: the same command again goes on from those that began there, also from a copy of it."""
    run_to(run_of(tmp_path / "other", save_every_steps=1), 1)
    run_to(run_of(tmp_path / "run", save_every_steps=1), 3)
    named = tmp_path / ("run" if inside else "other") / "checkpoints" / "step_1"
    copy = shutil.copytree(named, tmp_path / "copy")
    capsys.readouterr()
    run_to(run_of(tmp_path / "run", save_every_steps=1, resume=str(named)), 2)
    moved = tmp_path / "run" / ("checkpoints/step_3.1" if inside else "checkpoints.1/step_3")
    assert capsys.readouterr().err == (
        f"warning: trainer.resume={named}: checkpoints of {tmp_path / 'run'} that did not begin there are moved aside; "
        f"to go on from their newest instead, give trainer.resume={moved}\n"
    )
    run_to(run_of(tmp_path / "run", save_every_steps=1, resume=str(copy)), 3)
    assert capsys.readouterr().err == ""
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == ([1, 2, 3] if inside else [2, 3])
    assert run_of(tmp_path / "run", save_every_steps=1, resume=str(moved)).first_step == 4


def test_each_engine_knows_where_a_step_goes_that_is_skipped(tmp_path, run_of):
    run = run_of(tmp_path, roles=("policy", "critic"), total_steps=2)
    with run:
        seen = [[engine.bundle for engine in run._engines.values()] for _ in run.steps()]
    folder = tmp_path / "nonfinite"
    assert seen == [[str(folder / f"step_{step}"), str(folder / f"step_{step}_critic")] for step in (1, 2)]


def test_a_run_goes_on_from_its_newest_whole_checkpoint(tmp_path, fake_group, run_of, capsys):
    """Of steps 2 and 4 the later one counts; one without a manifest, and half of one, do not."""
    counter = Counter()
    run = run_of(tmp_path, counter=counter, save_every_steps=2)
    with run:
        for step in run.steps():
            if step == 5:
                break
            counter.number = 10 * step
            run.report(step, {"train/loss": MetricValue.sum(float(step))}, num_tokens=1)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step_4" / "manifest.json").unlink()
    (checkpoints / ".step_5.tmp" / "hf").mkdir(parents=True)
    group, counter = group_of(fake_group), Counter()
    run = run_of(tmp_path, group, counter=counter, save_every_steps=2)
    with run:
        assert group.calls == [
            ("verify_files", str(checkpoints / "step_2")),
            ("load_state", "policy", str(checkpoints / "step_2" / "state" / "policy")),
        ]
        assert counter.number == 20
        assert steps_saved(tmp_path) == {"step_2", "step_4.1"}
        done = []
        for step in run.steps():
            run.report(step, {"train/loss": MetricValue.sum(100.0)}, num_tokens=1)
            done.append(step)
    assert done == [3, 4, 5]
    assert [(row["step"], row["train/loss"]) for row in lines(tmp_path / "metrics.jsonl")] == [
        (1, 1.0), (2, 2.0), (3, 100.0), (4, 100.0), (5, 100.0),
    ]  # fmt: skip
    assert [row["step"] for row in lines(tmp_path / "performance.jsonl")] == [1, 2, 3, 4, 5]
    assert f"sft: resumes from {checkpoints / 'step_2'}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("trainer", "initial"), [({"resume": "never"}, True), ({"resume": "auto"}, False)])
def test_trained_weights_are_those_of_the_model_folder_or_of_the_checkpoint(
    tmp_path, fake_group, run_of, trainer, initial
):
    run_to(run_of(tmp_path, save_every_steps=1), 2)
    group = fake_group(1, load_initial_weights=lambda *_: 250)
    run = run_of(tmp_path, group, **trainer)
    run._engines[""].has_weights = False
    with run:
        run.report(run.first_step, {"train/loss": MetricValue.sum(1.0)}, num_tokens=1)
    assert ("load_initial_weights", "policy") in group.calls if initial else "load_initial_weights" not in group.methods
    assert ("load_state" in group.methods) != initial
    assert lines(tmp_path / "performance.jsonl")[-1]["load/bytes_read"] == (250 if initial else 100)


def test_logs_are_on_the_disk_before_a_checkpoint_has_its_name_and_rows_that_are_lost_then_are_told(
    tmp_path, run_of, monkeypatch, capsys
):
    synced = []
    monkeypatch.setattr(LogFile, "sync", lambda log: synced.append((log.name, sorted(steps_saved(tmp_path)))))
    with run_of(tmp_path, save_every_steps=2) as run:
        samples = run.sample_log()
        for step in run.steps():
            if step == 5:
                break
            samples.append([{"step": step, "completion": "x"}])
            run.report(step, {"train/loss": MetricValue.sum(float(step))}, num_tokens=1)
    names = ("metrics.jsonl", "performance.jsonl", "samples.jsonl")
    assert synced == [(name, saved) for saved in ([], ["step_2"]) for name in names]
    kept, num_bytes = (tmp_path / "metrics.jsonl").read_bytes(), (tmp_path / "samples.jsonl").stat().st_size
    with run_of(tmp_path) as run:
        run.sample_log()
        assert (tmp_path / "metrics.jsonl").read_bytes() == kept
    assert " lacks " not in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_bytes(kept[:-5])
    (tmp_path / "samples.jsonl").unlink()
    with run_of(tmp_path) as run:
        run.sample_log()
    told = capsys.readouterr().err
    last = len(kept.splitlines()[-1]) + 1
    assert f"{tmp_path / 'metrics.jsonl'} lacks {last} bytes of what was written up to step 4" in told
    assert f"{tmp_path / 'samples.jsonl'} lacks {num_bytes} bytes" in told


def test_a_checkpoint_that_fails_leaves_nothing_and_the_earlier_one_whole(tmp_path, fake_group, run_of):
    def full(*arguments):
        if "step_4" in arguments[-1]:
            raise OSError(28, "No space left on device")
        save(*arguments)

    group = fake_group(1, nonfinite_tensors=lambda *_: [], save=full, hash_files=lambda *_: {})
    with pytest.raises(ExportError, match=r"step_4 cannot be written: .*No space left on device"):
        run_to(run_of(tmp_path, group, save_every_steps=2, save_retries=0), 5)
    assert steps_saved(tmp_path) == {"step_2"}
    assert run_of(tmp_path, save_every_steps=2).first_step == 3


def test_the_best_checkpoint_stays_through_a_restart_until_a_better_one_comes(tmp_path, run_of):
    """Losses 3, 1, 2, then a restart, 4, 0.5, 5."""
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: 0.5, 6: 5.0}
    kept = {}
    keys = {"save_every_steps": 1, "keep_last": 1, "keep_best": {"metric": "train/loss", "mode": "min"}}
    for last_step in (3, 6):
        with run_of(tmp_path, total_steps=6, **keys) as run:
            for step in run.steps():
                kept[step - 1] = steps_saved(tmp_path)
                if step > last_step:
                    break
                run.report(step, {"train/loss": MetricValue.sum(losses[step])}, num_tokens=1)
    kept[6] = steps_saved(tmp_path)
    expected = {0: [], 1: [1], 2: [2], 3: [2, 3], 4: [2, 4], 5: [5], 6: [5, 6]}
    assert kept == {step: {f"step_{number}" for number in numbers} for step, numbers in expected.items()}
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_6\n"


def test_a_metric_of_keep_best_that_is_never_reported_ends_the_run_after_its_first_checkpoint(tmp_path, run_of):
    keys = {"save_every_steps": 2, "keep_last": 1, "keep_best": {"metric": "reward/maen", "mode": "max"}}
    with pytest.raises(ConfigError, match=r"reward/maen is no metric of this run; the nearest of its 1 are train/loss"):
        run_to(run_of(tmp_path, **keys), 5)
    assert steps_saved(tmp_path) == {"step_2"}


@pytest.mark.parametrize(("total_steps", "finished"), [(4, True), (5, True), (6, False)])
def test_a_run_is_finished_that_has_done_all_of_its_steps_and_says_so(tmp_path, run_of, capsys, total_steps, finished):
    run_to(run_of(tmp_path), 5)
    capsys.readouterr()
    assert is_finished(config(tmp_path), total_steps=total_steps) is finished
    told = (
        f"sft: nothing to do: {tmp_path / 'checkpoints' / 'step_5'} has done 5 steps, and the run is of {total_steps}; "
        "a larger trainer.total_steps continues it, trainer.resume=never starts anew and moves it aside\n"
    )
    assert capsys.readouterr().out == (told if finished else "")


def test_what_begins_is_not_finished(tmp_path, run_of, capsys):
    assert not is_finished(config(tmp_path), total_steps=5)
    run_to(run_of(tmp_path), 5)
    assert not is_finished(config(tmp_path, resume="never"), total_steps=5)
    assert "nothing to do" not in capsys.readouterr().out


def test_a_finished_run_that_is_named_for_another_folder_leaves_nothing_to_do(tmp_path, run_of):
    run_to(run_of(tmp_path / "a"), 5)
    with pytest.raises(ConfigError, match=r"trainer.resume=.*a leaves nothing to do: .*step_5 has done 5 steps"):
        is_finished(config(tmp_path / "b", resume=str(tmp_path / "a")), total_steps=5)


PAIR = {"prompt": "2+3=", "chosen": "5", "rejected": "6"}
SHORT = {"max_sequence_tokens": 64}
RECIPES = {
    "sft": (SFTConfig, sft.train, {"prompt": "2+3=", "response": "5"}, SHORT, {}),
    "preference": (PreferenceConfig, preference.train, PAIR, SHORT, {}),
    "reward-model": (RewardModelConfig, reward_model.train, PAIR, SHORT, {}),
    "distill": (DistillConfig, distill.train, {"prompt": "2+3=", "response": "5"}, SHORT, {}),
    "rl": (
        RLConfig,
        rl.train,
        {"prompt": "2+3=", "ground_truth": "5"},
        {"max_prompt_tokens": 32, "ground_truth_column": "ground_truth"},
        {"reward": {"functions": "a:b"}, "rollout": {"max_response_tokens": 32}},
    ),
}
"""Config, loop, a row, keys of the data and further keys of every recipe, by its title."""


@pytest.mark.parametrize("title", RECIPES)
def test_for_a_finished_run_nothing_is_built_and_its_folder_stays_as_it_is(
    tmp_path, fake_group, model_folder, write_jsonl, capsys, title
):
    """Of a run of more steps that another process is at: its logs are ahead of the checkpoint."""
    kind, train, row, data, more = RECIPES[title]
    run, model = tmp_path / "run", {"path": str(model_folder)}
    more = {"teacher": {"model": model}} if title == "distill" else more
    tree = {
        "model": model,
        "data": {"train_files": write_jsonl("rows.jsonl", [row] * 2), "apply_chat_template": False, **data},
        "trainer": {"output_dir": str(run), "total_steps": 3},
    }
    whole = kind.parse(tree | more, origin="test")
    (checkpoint := run / "checkpoints" / "step_3").mkdir(parents=True)
    write_run(checkpoint, whole, step=3, parts={}, files={})
    write_manifest(checkpoint, [], step=3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        (run / name).write_text("".join(json.dumps({"step": step}) + "\n" for step in (3, 4)))
    before, group = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}, fake_group(1)
    train(whole, group)
    assert capsys.readouterr().out.endswith("starts anew and moves it aside\n")
    assert group.calls == []
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("stop_at", "saved"), [(2, [2]), (3, [3]), (5, [3, 5])])
def test_a_signal_ends_the_run_after_its_step_with_one_checkpoint(tmp_path, fake_group, run_of, stop_at, saved):
    """In step 3 a checkpoint is due anyway; the last step ends as ever."""
    group, done = group_of(fake_group), []

    def train():
        with run_of(tmp_path, group, save_every_steps=3) as run:
            for step in run.steps():
                done.append(step)
                if step == stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.2)
                run.report(step, {"train/loss": MetricValue.sum(1.5)}, num_tokens=1)

    if stop_at == 5:
        train()
    else:
        with pytest.raises(Stopped, match=f"resumable: the same command continues after step {stop_at}") as stopped:
            train()
        assert stopped.value.code == 143
    assert done == list(range(1, stop_at + 1))
    assert group.methods.count("save") == len(saved)
    assert {path.name for path in (tmp_path / "checkpoints").glob("step_*")} == {f"step_{step}" for step in saved}
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_was_logged_before_an_error_stays_readable(tmp_path, run_of):
    def train():
        with run_of(tmp_path) as run:
            for step in run.steps():
                run.report(step, {"train/loss": MetricValue.sum(1.5)}, num_tokens=1)
                if step == 3:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert [row["train/loss"] for row in lines(tmp_path / "metrics.jsonl")] == [1.5] * 3


@pytest.mark.parametrize(
    "error", [KeyError("reward"), RuntimeError("Connection closed by peer"), Stopped("s", "t", 143), None]
)
def test_logs_that_cannot_be_written_do_not_replace_what_ended_the_run(tmp_path, run_of, capsys, error):
    expected = ExportError if error is None or isinstance(error, Stopped) else type(error)

    def train():
        with run_of(tmp_path, total_steps=3, save_every_steps=1, async_save=False, on_save_error="continue") as run:
            for step in run.steps():
                if step == 2:
                    (tmp_path / "metrics.jsonl").rename(tmp_path / "moved")
                run.report(step, {"train/loss": MetricValue.sum(1.5)}, num_tokens=1)
                if step == 2 and error is not None:
                    raise error

    with pytest.raises(expected) as ended:
        train()
    told = capsys.readouterr()
    lost = r"cannot be written: \[Errno 2\] it was removed"
    assert re.search(lost, str(ended.value) if expected is ExportError else told.err)
    assert told.out.endswith(f"sft: saved {tmp_path / 'checkpoints' / ('step_1' if error else 'step_3')}\n")


def test_a_log_that_ends_the_run_is_told_once(tmp_path, run_of, capsys):
    def train():
        with run_of(tmp_path) as run:
            for step in run.steps():
                (tmp_path / "metrics.jsonl").rename(tmp_path / "moved")
                run.report(step, {"train/loss": MetricValue.sum(1.5)}, num_tokens=1)

    with pytest.raises(ExportError, match="it was removed or moved while the run wrote it"):
        train()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (RankSilentError("rank 1 did not answer `train` within 10 s"), False),
        (RuntimeError("[gloo] Timed out waiting 10000ms for recv operation to complete"), False),
        (ZeroDivisionError("of this rank"), True),
    ],
    ids=["silent rank", "lost connection", "own error"],
)
def test_f03_nobody_waits_for_a_save_that_a_lost_rank_holds_up(tmp_path, run_of, monkeypatch, error, waits):
    """The save would wait for that rank by its own deadline, an hour, and the job with it."""
    run, waited = run_of(tmp_path), []
    monkeypatch.setattr(run._saver, "wait", lambda: waited.append(True))
    with pytest.raises(type(error)), run:
        raise error
    assert waited == [True] * waits


def test_f27_logs_without_a_checkpoint_are_told_when_a_run_starts_anew(tmp_path, run_of, capsys):
    """A disk that is not mounted looks like that."""
    run_to(run_of(tmp_path), 5)
    assert capsys.readouterr().err == ""
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    run_to(run_of(tmp_path), 2)
    assert capsys.readouterr().err == (
        f"warning: {tmp_path}/metrics.jsonl is of a run of which {tmp_path}/checkpoints holds nothing to resume from; "
        "starts at the beginning and moves its logs aside\n"
    )
    run_to(run_of(tmp_path, resume="never"), 2)
    assert capsys.readouterr().err == ""


def test_ranks_that_do_not_see_the_output_folder_are_named_with_their_hosts(tmp_path, run_of, fake_group):
    seen = []
    group = fake_group(3, sees=lambda rank, path: seen.append(Path(path).is_file()) or [None, "b", "c"][rank])
    told = rf"trainer\.output_dir={tmp_path}: what rank 0 writes there is not seen by rank 1 on b, rank 2 on c"
    with pytest.raises(ConfigError, match=told):
        run_to(run_of(tmp_path, group), 2)
    assert seen == [True] * 3
    assert not list(tmp_path.glob(".seen*"))


def test_an_output_folder_that_is_a_file_is_named(tmp_path, run_of):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(ConfigError, match=r"trainer.output_dir=.*taken cannot be written to: .*; give a folder"):
        run_of(tmp_path / "taken").__enter__()


def test_incidents_go_with_the_times_and_change_no_metric(run_of, tmp_path):
    with run_of(tmp_path / "run", total_steps=2) as run:
        for step in run.steps():
            incidents = {"rollout/engine_restarts": 3.0} if step == 2 else None
            run.report(step, {"train/loss": MetricValue.sum(1.5)}, num_tokens=1, incidents=incidents)
    performance = lines(tmp_path / "run" / "performance.jsonl")
    assert [row.get("rollout/engine_restarts") for row in performance] == [None, 3.0]
    assert all(row.keys() == {"step", "train/loss"} for row in lines(tmp_path / "run" / "metrics.jsonl"))
