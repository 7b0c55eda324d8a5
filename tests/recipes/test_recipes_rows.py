"""Batches of rows, and what is read for them."""

from dataclasses import replace

import pytest
from tiny_models import tiny_vision_model

from shardwise.config import (
    BatchTrainerConfig,
    ConfigError,
    DataError,
    ModelConfig,
    PreferenceDataConfig,
    SupervisedDataConfig,
)
from shardwise.data import labelled_samples, preference_pairs, supervised_samples
from shardwise.recipes.opened_model import open_model
from shardwise.recipes.rows import open_rows


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


def test_sequences_longer_than_the_context_are_refused_before_a_file_is_read(model):
    settings = data(SupervisedDataConfig, "nowhere.jsonl", max_sequence_tokens=97)
    with pytest.raises(ConfigError, match=r"data\.max_sequence_tokens = 97 tokens, more than the 96"):
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
