"""Batches of rows, and what is read for them."""

import pytest

from shardwise.config import (
    BatchTrainerConfig,
    ConfigError,
    DataError,
    ModelConfig,
    PreferenceDataConfig,
    SupervisedDataConfig,
)
from shardwise.data import preference_pairs, supervised_samples
from shardwise.recipes.build import open_model
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


def test_sequences_longer_than_the_context_are_refused_before_a_file_is_read(model):
    settings = data(SupervisedDataConfig, "nowhere.jsonl", max_sequence_tokens=97)
    with pytest.raises(ConfigError, match=r"data\.max_sequence_tokens = 97 tokens, more than the 96"):
        open_rows(supervised_samples, settings, trainer(), model)


def test_a_run_goes_on_with_as_many_rows_or_not_at_all(model, write_jsonl):
    files = write_jsonl("rows.jsonl", [{"prompt": f"{n}=", "response": str(n)} for n in range(5)])
    five, four = (
        open_rows(supervised_samples, data(SupervisedDataConfig, files, max_train_rows=count), trainer(), model)
        for count in (5, 4)
    )
    five.load_state_dict(five.state_dict())
    with pytest.raises(
        DataError, match="had 5 training rows, now there are 4, which come in another order; bring back"
    ):
        four.load_state_dict(five.state_dict())
