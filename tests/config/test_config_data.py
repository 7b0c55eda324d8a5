import re

import pytest

from shardwise.config import ConfigError, DataConfig, PreferenceDataConfig, PromptDataConfig, SupervisedDataConfig


def test_one_path_is_a_list_of_one():
    config = DataConfig.parse({"train_files": "a.jsonl", "validation_files": ["b", "c"]}, origin="test")
    assert (config.train_files, config.validation_files) == (["a.jsonl"], ["b", "c"])


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (DataConfig, "max_train_rows", 0),
        (DataConfig, "max_validation_rows", -1),
        (DataConfig, "train_files", 3),
        (SupervisedDataConfig, "max_sequence_tokens", 0),
        (SupervisedDataConfig, "on_overlong", "skip"),
        (PreferenceDataConfig, "max_sequence_tokens", 0),
        (PreferenceDataConfig, "on_overlong", "skip"),
        (PreferenceDataConfig, "margin_column", ["a"]),
        (PromptDataConfig, "max_prompt_tokens", 0),
        (PromptDataConfig, "on_overlong", "skip"),
    ],
)
def test_value_out_of_range_is_refused(cls, key, value):
    with pytest.raises(ConfigError, match=rf"^test: {key}={re.escape(repr(value))}: input should be "):
        cls.parse({key: value}, origin="test")


def test_system_prompt_without_a_chat_template_is_refused():
    tree = {"system_prompt": "Be brief.", "apply_chat_template": False}
    with pytest.raises(ConfigError) as error:
        DataConfig.parse(tree, origin="test")
    assert str(error.value) == (
        "test: system_prompt needs the chat template; set apply_chat_template=true or remove it"
    )


def test_a_column_of_tools_that_nothing_renders_is_refused():
    tree = {"tools_column": "offers", "apply_chat_template": False}
    with pytest.raises(ConfigError, match=r"^test: tools_column=offers has no effect without the chat template"):
        SupervisedDataConfig.parse(tree, origin="test")
    assert SupervisedDataConfig.parse({"apply_chat_template": False}, origin="test").tools_column == "tools"


def test_keys_of_the_other_kind_of_data_are_unknown():
    with pytest.raises(ConfigError, match=r"^test: max_prompt_tokens: unknown key"):
        SupervisedDataConfig.parse({"max_prompt_tokens": 5}, origin="test")
    with pytest.raises(ConfigError, match=r"^test: response_column: unknown key"):
        PromptDataConfig.parse({"response_column": "answer"}, origin="test")


def test_two_sides_of_a_pair_from_one_column_are_refused():
    with pytest.raises(ConfigError) as error:
        PreferenceDataConfig.parse({"chosen_column": "rejected"}, origin="test")
    assert str(error.value) == (
        "test: chosen_column and rejected_column are both rejected, so every pair would be one answer compared with "
        "itself; name two columns"
    )
