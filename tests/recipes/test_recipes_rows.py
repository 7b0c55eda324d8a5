"""Batches of rows, and what is read for them."""

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_vision_model

from shardwise.config import (
    BatchTrainerConfig,
    ConfigError,
    DataError,
    ModelConfig,
    PreferenceDataConfig,
    SFTConfig,
    SupervisedDataConfig,
)
from shardwise.data import labelled_samples, preference_pairs, supervised_samples
from shardwise.recipes.opened_model import OpenedModel, open_model
from shardwise.recipes.rows import held_out_metrics, open_rows, train_on_rows, writer_source
from shardwise.types import MetricValue


@pytest.fixture
def model(model_folder):
    return open_model(ModelConfig(path=str(model_folder)))


def data(cls, files, **keys):
    return cls(train_files=files, apply_chat_template=False, **{"max_sequence_tokens": 64, "shuffle": False} | keys)


def trainer(**keys):
    return BatchTrainerConfig(**{"batch_size": 2, "num_epochs": 3} | keys)


def test_pairs_stay_together_over_the_border_of_an_epoch(model, write_jsonl):
    rows = [{"prompt": f"{n}=", "chosen": str(n), "rejected": str(n + 1)} for n in range(3)]
    files = write_jsonl("pairs.jsonl", rows)
    found = open_rows(preference_pairs, data(PreferenceDataConfig, files), trainer(), model, samples_per_row=2)
    assert [sample.group for sample in found.batch(1)] == [0, 0, 1, 1]
    assert [sample.group for sample in found.batch(2)] == [2, 2, 0, 0]
    assert [sample.uid.rsplit(" ", 1)[1] for sample in found.batch(2)] == ["chosen", "rejected"] * 2
    assert found.total_steps == 5  # two pairs each, of three times three
    assert found.counts["data/num_rows"].result() == 3
    assert found.held_out is None


def test_limits_of_rows_and_steps_are_kept(model, write_jsonl):
    files = write_jsonl("rows.jsonl", [{"prompt": f"{n}=", "response": str(n)} for n in range(5)])
    settings = data(SupervisedDataConfig, files, max_train_rows=4, validation_files=files, max_validation_rows=2)
    found = open_rows(supervised_samples, settings, trainer(total_steps=9), model)
    assert (len(found.samples), len(found.held_out), found.total_steps) == (4, 2, 9)
    assert [sample.uid for sample in found.batch(2)] == ["rows.jsonl line 3", "rows.jsonl line 4"]


@pytest.mark.parametrize("read", [supervised_samples, preference_pairs, labelled_samples])
@pytest.mark.parametrize("is_companion", [False, True])
def test_rows_may_not_spell_what_stands_for_images_to_one_of_the_models(
    model, write_jsonl, tmp_path, read, is_companion
):
    config = tiny_vision_model("qwen3_vl").config
    config.image_token_id = model.tokenizer.convert_tokens_to_ids("7")
    config.save_pretrained(tmp_path / "sees")
    seeing = replace(model, folder=tmp_path / "sees")
    row = {"prompt": "2+5=", "response": "7", "chosen": "7", "rejected": "8", "label": True}
    kind = SupervisedDataConfig if read is supervised_samples else PreferenceDataConfig
    settings = data(kind, write_jsonl("rows.jsonl", [row]))
    opened, others = (model, [seeing]) if is_companion else (seeing, [])
    with pytest.raises(DataError, match=r"^rows\.jsonl line 1: the text spells '7', by which the model knows a part"):
        open_rows(read, settings, trainer(), opened, companions=others)
    assert open_rows(read, settings, trainer(), model).samples


@pytest.mark.parametrize("read", [supervised_samples, preference_pairs, labelled_samples])
def test_every_row_that_is_read_is_progress(model, write_jsonl, monkeypatch, read):
    """Else a rank that reads millions of rows would be taken for one that hangs."""
    seen = []
    monkeypatch.setattr("shardwise.recipes.rows.go_on", lambda: seen.append(1))
    rows = [{"prompt": "2+5=", "response": "7", "chosen": "7", "rejected": "8", "label": True}] * 5
    kind = SupervisedDataConfig if read is supervised_samples else PreferenceDataConfig
    open_rows(read, data(kind, write_jsonl("rows.jsonl", rows)), trainer(), model)
    assert len(seen) == 5


def test_sequences_longer_than_the_context_are_refused_before_a_file_is_read(model):
    settings = data(SupervisedDataConfig, "nowhere.jsonl", max_sequence_tokens=97)
    with pytest.raises(ConfigError, match=r"data\.max_sequence_tokens=97 tokens, more than the 96"):
        open_rows(supervised_samples, settings, trainer(), model)


def test_a_run_goes_on_with_as_many_rows_or_with_others_where_it_may(model, write_jsonl, capsys):
    """With others as a run that had them from its start: the same rows in every step to come, and as many steps."""
    files = write_jsonl("rows.jsonl", [{"prompt": f"{n}=", "response": str(n)} for n in range(5)])
    five, four = (
        open_rows(supervised_samples, data(SupervisedDataConfig, files, max_train_rows=count), trainer(), model)
        for count in (5, 4)
    )
    five.load_state_dict(five.state_dict())
    with pytest.raises(
        DataError,
        match=r"had 5 training rows, now there are 4, which come in another order; bring back its data, allow others "
        r"with trainer\.resume_allow=\[data\.train_files\], or begin",
    ):
        four.load_state_dict(five.state_dict())
    settings = data(SupervisedDataConfig, files, max_train_rows=4)
    allowed = open_rows(supervised_samples, settings, trainer(resume_allow=["data.max_train_rows"]), model)
    assert capsys.readouterr().err == ""
    allowed.load_state_dict(five.state_dict())
    assert capsys.readouterr().err == (
        "warning: the run that is resumed had 5 training rows, now there are 4: it goes on in their order, behind as "
        "many as it has taken, so in the epoch under way some may come again and others not at all; where "
        "trainer.num_epochs gives its length, these rows count\n"
    )
    assert allowed.total_steps == four.total_steps < five.total_steps
    uids = [[sample.uid for sample in rows.batch(step)] for rows in (allowed, four) for step in range(3, 9)]
    assert uids[:6] == uids[6:]
    assert allowed.state_dict() == four.state_dict()
    four.load_state_dict(allowed.state_dict())
    assert capsys.readouterr().err == ""


def test_batches_of_another_size_go_on_behind_the_rows_that_were_taken(model, write_jsonl):
    files = write_jsonl("rows.jsonl", [{"prompt": f"{n}=", "response": str(n)} for n in range(12)])
    two, three, five = (
        open_rows(supervised_samples, data(SupervisedDataConfig, files), trainer(batch_size=size), model)
        for size in (2, 3, 5)
    )
    uids = [sample.uid for step in (1, 2) for sample in two.batch(step)]
    three.load_state_dict(two.state_dict())
    uids += [sample.uid for sample in three.batch(3)]
    five.load_state_dict(three.state_dict())
    uids += [sample.uid for sample in five.batch(4)]
    assert uids == [f"rows.jsonl line {n}" for n in range(1, 13)]
    five.load_state_dict({"num_rows": 12})  # of an early checkpoint
    assert [sample.uid for sample in five.batch(2)] == [f"rows.jsonl line {n}" for n in range(6, 11)]


def test_a_run_whose_template_writes_something_else_now_is_told_so(model, write_jsonl, capsys):
    """As templates do that write the date."""
    files = write_jsonl("rows.jsonl", [{"prompt": f"{n}=", "response": str(n)} for n in range(5)])
    settings = data(SupervisedDataConfig, files).model_copy(update={"apply_chat_template": True})
    template, found = model.tokenizer.chat_template, []
    for written in ("1", "2", "2"):
        tokenizer = copy.deepcopy(model.tokenizer)
        tokenizer.chat_template = written + template
        found.append(open_rows(supervised_samples, settings, trainer(), replace(model, tokenizer=tokenizer)))
    first, second, third = found
    third.load_state_dict(second.state_dict())
    second.load_state_dict({"num_rows": 5})  # of an early checkpoint
    assert capsys.readouterr().err == ""
    second.load_state_dict(first.state_dict())
    assert capsys.readouterr().err.startswith("warning: the training rows have other tokens than in the run that is")


class RecordedRun:
    """Two steps, the second of which validates; everything that happens, in order."""

    def __init__(self):
        self.events = []

    def steps(self):
        yield from (1, 2)

    @contextmanager
    def spans(self, name):
        self.events.append(f"begin {name}")
        yield
        self.events.append(f"end {name}")

    def should_validate(self, step):
        return step == 2

    def report(self, step, metrics, *, num_tokens):
        self.events.append((step, {name: value.result() for name, value in metrics.items()}, num_tokens))


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("validates", [False, True])
def test_each_step_trains_on_its_batch_and_reports_it_with_what_was_held_out(model, write_jsonl, scores, validates):
    files = write_jsonl("rows.jsonl", [{"prompt": f"{n}=", "response": str(n)} for n in range(4)])
    settings = data(SupervisedDataConfig, files, validation_files=files if validates else [], max_validation_rows=1)
    rows, run = open_rows(supervised_samples, settings, trainer(), model), RecordedRun()

    def step(batch):
        run.events.append([sample.reward for sample in batch])
        return {"train/loss": MetricValue.mean(float(len(batch)), 1)}

    def validate(held_out):
        assert held_out is rows.held_out
        return {"val/loss": MetricValue.mean(7.0, 1)}

    def score(batch):
        return [replace(sample, reward=float(sample.uid[-1])) for sample in batch]

    train_on_rows(run, rows, step=step, validate=validate, score=score if scores else None)
    counts = {name: value.result() for name, value in rows.counts.items()}
    expected = []
    for number, lines in ((1, [1.0, 2.0]), (2, [3.0, 4.0])):
        metrics = {"train/loss": 2.0}
        expected += ["begin logprobs", "end logprobs"] if scores else []
        expected += ["begin train", lines if scores else [0.0, 0.0], "end train"]
        if validates and number == 2:
            expected += ["begin validate", "end validate"]
            metrics["val/loss"] = 7.0
        num_tokens = sum(len(sample.token_ids) for sample in rows.batch(number))
        expected.append((number, metrics | counts, num_tokens))
    assert run.events == expected


def test_metrics_of_held_out_rows_are_the_losses_own_under_val():
    metrics = {"preference/accuracy": MetricValue.mean(1.0, 4), "margin": MetricValue.mean(6.0, 4)}
    found = held_out_metrics(torch.tensor([1.0, 2.0, 6.0]), metrics)
    assert {name: value.result() for name, value in found.items()} == {
        "val/loss": 3.0,
        "val/accuracy": 0.25,
        "val/margin": 1.5,
    }


@pytest.mark.parametrize("renders", [True, False])
def test_a_writer_ends_completions_as_the_template_of_its_rows_ends_turns(model_folder, monkeypatch, renders):
    monkeypatch.setattr(OpenedModel, "turn_end_id", 5)
    keys = {"model": {"path": str(model_folder)}, "data": {"train_files": "x", "apply_chat_template": renders}}
    config = SFTConfig.parse(keys | {"trainer": {"output_dir": "out", "seed": 3}}, origin="test")
    source = writer_source(config, open_model(config.model))
    assert (source.turn_end_id, source.seed, source.layout) == (5 if renders else None, 3, config.engine)
