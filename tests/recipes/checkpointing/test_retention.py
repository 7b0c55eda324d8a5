import json

import pytest

from shardwise.config import ConfigError, TrainerConfig
from shardwise.recipes.checkpointing.manifest import MANIFEST, Manifest, write_manifest
from shardwise.recipes.checkpointing.retention import Reported, after_saving, best_step, kept_steps, remove_old


def trainer(**keys) -> TrainerConfig:
    return TrainerConfig.parse({"save_every_steps": 10, "validate_every_steps": 10, **keys}, origin="test")


def manifests(values, *, not_finite=()):
    """By step, with the value of val/accuracy or without one."""
    return {
        step: Manifest(frozenset(), {} if value is None else {"val/accuracy": value}, step not in not_finite, None)
        for step, value in values.items()
    }


def leave(run, values):
    for step, value in values.items():
        folder = run / "checkpoints" / f"step_{step}"
        (folder / "hf").mkdir(parents=True)
        (folder / "hf" / "weights").write_text("w")
        write_manifest(
            folder, [{}], step=step, metrics={} if value is None else {"val/accuracy": value}, all_finite=True
        )


def names(run):
    return {path.name for path in (run / "checkpoints").iterdir()}


STEPS = {10: None, 20: 0.5, 30: None, 40: 0.7, 50: None, 60: 0.7, 70: None, 80: 0.6, 90: None}
BEST = {"metric": "val/accuracy", "mode": "max"}


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({}, set(STEPS)),
        ({"keep_last": 1}, {90}),
        ({"keep_last": 3}, {70, 80, 90}),
        ({"keep_last": 20}, set(STEPS)),
        ({"keep_last": 1, "keep_every_steps": 30}, {30, 60, 90}),
        ({"keep_last": 1, "keep_best": BEST}, {40, 90}),
        ({"keep_last": 2, "keep_best": BEST | {"mode": "min"}}, {20, 80, 90}),
        ({"keep_last": 2, "keep_best": BEST | {"metric": "val/loss"}}, {80, 90}),
        ({"keep_last": 1, "keep_every_steps": 50, "keep_best": BEST}, {40, 50, 90}),
    ],
)
def test_what_the_config_names_stays(keys, kept):
    assert kept_steps(manifests(STEPS), trainer(**keys)) == kept


def test_trap_17_the_newest_and_the_newest_finite_one_always_stay():
    found = manifests(dict.fromkeys((1, 2, 3, 4)), not_finite=(3, 4))
    assert kept_steps(found, trainer(keep_last=1)) == {2, 4}
    assert kept_steps({}, trainer(keep_last=1)) == set()


def test_of_equal_values_the_earliest_is_the_best_whatever_order_they_come_in():
    found = manifests({9: 0.5, 10: 0.5, 100: 0.2})
    rule = trainer(keep_last=1, keep_best=BEST).keep_best
    assert best_step(found, rule) == best_step(dict(reversed(found.items())), rule) == 9
    assert best_step(manifests({3: None}), rule) is None


def test_the_values_are_read_from_the_checkpoints_so_another_process_finds_the_same_best(tmp_path):
    """Of a run that saves one after the other, and forgets everything in between."""
    for step, value in STEPS.items():
        leave(tmp_path, {step: value})
        remove_old(tmp_path, trainer(keep_last=1, keep_best=BEST))
    assert names(tmp_path) == {"step_40", "step_90"}


def test_trap_17_only_whole_checkpoints_are_removed_and_nothing_else(tmp_path):
    leave(tmp_path, dict.fromkeys((10, 20, 30, 40)))
    (tmp_path / "checkpoints" / "step_20" / MANIFEST).unlink()
    (tmp_path / "checkpoints" / "step_5.1" / "hf").mkdir(parents=True)
    (tmp_path / "checkpoints" / "notes").write_text("mine")
    after_saving(tmp_path, 40, trainer(keep_last=1), Reported())
    assert names(tmp_path) == {"step_40", "step_20", "step_5.1", "notes", "latest"}
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_40\n"


def test_a_file_system_that_does_not_let_go_is_named_and_the_run_goes_on(tmp_path, capsys):
    """A file stands where the old checkpoint would be hidden."""
    leave(tmp_path, dict.fromkeys((10, 20)))
    (tmp_path / "checkpoints" / ".step_10.tmp").write_text("")
    after_saving(tmp_path, 20, trainer(keep_last=1), Reported())
    assert "older checkpoints in" in capsys.readouterr().err
    assert names(tmp_path) == {"step_10", "step_20", ".step_10.tmp", "latest"}


def test_a_metric_that_the_run_does_not_report_is_an_error_that_names_those_it_does(tmp_path):
    reported = Reported()
    reported.require("reward/maen")  # nothing was reported so far
    reported.add({"reward/mean": 1.0, "train/loss": float("nan")}, names=["reward/mean", "train/loss"], validates=False)
    assert reported.newest == {"reward/mean": 1.0}
    reported.require("train/loss")
    reported.require("val/acuracy")  # the first validation is still to come
    with pytest.raises(ConfigError) as error:
        reported.require("reward/maen")
    assert str(error.value).startswith(
        "trainer.keep_best.metric=reward/maen is no metric of this run; did you mean reward/mean? the nearest of its 2 "
        "are reward/mean, train/loss. The checkpoint is saved"
    )
    reported.add({"reward/mean": 1.0, "val/accuracy": 0.5}, names=["reward/mean", "val/accuracy"], validates=True)
    reported.add({"reward/mean": 1.0}, names=["reward/mean"], validates=False)
    reported.require("val/accuracy")
    leave(tmp_path, dict.fromkeys((10, 20)))
    rule = BEST | {"metric": "val/acuracy"}
    with pytest.raises(ConfigError, match=r"keep_best.metric=val/acuracy"):
        after_saving(tmp_path, 20, trainer(keep_last=1, keep_best=rule), reported)
    assert names(tmp_path) == {"step_10", "step_20"}


def test_of_many_metrics_the_nearest_to_a_misspelt_one_are_named():
    reported = Reported()
    names = [f"{group}/{name}" for group in ("reward", "train", "rollout") for name in ("mean", "std", "min", "max")]
    reported.add({}, names=names, validates=False)
    with pytest.raises(ConfigError, match=r"did you mean reward/std\? the nearest of its 12 are reward/std, ") as error:
        reported.require("reward/sdt")
    assert sum(name in str(error.value) for name in names) == 5
    with pytest.raises(ConfigError, match=r"is no metric of this run; the nearest of its 12 are "):
        reported.require("q")


def test_metrics_are_in_the_manifest_as_they_were_reported(tmp_path):
    leave(tmp_path, {10: 0.1 + 0.2})
    content = json.loads((tmp_path / "checkpoints" / "step_10" / MANIFEST).read_text())["content"]
    assert content["metrics"] == {"val/accuracy": 0.1 + 0.2}
    assert content["all_finite"] is True
