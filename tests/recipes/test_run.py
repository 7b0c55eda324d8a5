import json

import pytest
import yaml

from shardwise.config import ConfigError, ModelConfig, SFTConfig
from shardwise.recipes.run import Run
from shardwise.types import MetricValue


def config(output_dir, **trainer) -> SFTConfig:
    tree = {
        "model": {"path": "m"},
        "data": {"train_files": "t.jsonl"},
        "trainer": {"output_dir": str(output_dir), "tensorboard": False, **trainer},
    }
    return SFTConfig.parse(tree, origin="test")


@pytest.fixture
def run_of(fake_group, remote):
    def make(output_dir, group=None, *, roles=("policy",), total_steps=5, **trainer) -> Run:
        whole = config(output_dir, **trainer)
        engines = {"" if role == "policy" else role: remote(group or fake_group(), role) for role in roles}
        return Run("sft", whole, whole.trainer, engines=engines, total_steps=total_steps)

    return make


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_of_a_run_hold_what_was_reported(tmp_path, fake_group, run_of, capsys):
    group = fake_group()
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
    for row in lines(tmp_path / "performance.jsonl"):
        assert row["tokens_per_second"] * row["seconds/step"] == pytest.approx(100)
        assert row["seconds/train"] <= row["seconds/step"]
    assert validated == [3, 5]
    model = ModelConfig(path="m").model_dump_json()
    assert group.calls == [
        ("save_weights", "policy", model, str(tmp_path / "checkpoints" / f"step_{step}")) for step in (2, 4, 5)
    ]
    written = SFTConfig.parse(yaml.safe_load((tmp_path / "config.yaml").read_text()), origin="config.yaml")
    assert written == config(tmp_path, save_every_steps=2, validate_every_steps=3)
    printed = capsys.readouterr().out
    assert "step 5/5" in printed
    assert printed.startswith(f"sft: 7.0M parameters (0.50M trained) on 1 rank, 5 steps, into {tmp_path}\n")
    assert printed.endswith(f"sft: saved {tmp_path / 'checkpoints' / 'step_5'}\n")


def test_a_checkpoint_holds_every_engine_in_a_folder_of_its_own(tmp_path, fake_group, run_of):
    group = fake_group(2)
    with run_of(tmp_path, group, roles=("policy", "critic"), save_every_steps=3) as run:
        list(run.steps())
    checkpoints = tmp_path / "checkpoints"
    assert [(call[1], call[-1]) for call in group.calls] == [
        (role, str(checkpoints / f"step_{step}" / folder))
        for step in (3, 5)
        for role, folder in (("policy", ""), ("critic", "critic"))
    ]


def test_zero_means_only_at_the_end(tmp_path, fake_group, run_of):
    group = fake_group()
    with run_of(tmp_path, group) as run:
        assert [step for step in run.steps() if run.should_validate(step)] == [5]
    assert [call[-1] for call in group.calls] == [str(tmp_path / "checkpoints" / "step_5")]


def test_an_earlier_run_in_the_folder_is_moved_aside_whole(tmp_path, run_of):
    for value in (1.0, 2.0):
        with run_of(tmp_path, total_steps=1) as run:
            for step in run.steps():
                (tmp_path / "checkpoints" / "step_1").mkdir(parents=True)
                (tmp_path / "checkpoints" / "step_1" / "mark").write_text(str(value))
                run.report(step, {"train/loss": MetricValue.sum(value)}, num_tokens=1)
    assert lines(tmp_path / "metrics.jsonl")[0]["train/loss"] == 2.0
    assert lines(tmp_path / "metrics.jsonl.1")[0]["train/loss"] == 1.0
    assert (tmp_path / "checkpoints" / "step_1" / "mark").read_text() == "2.0"
    assert (tmp_path / "checkpoints.1" / "step_1" / "mark").read_text() == "1.0"


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


def test_an_output_folder_that_is_a_file_is_named(tmp_path, run_of):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(ConfigError, match=r"trainer.output_dir=.*taken cannot be written to"):
        run_of(tmp_path / "taken").__enter__()
