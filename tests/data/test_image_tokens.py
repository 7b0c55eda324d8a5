"""Tokens that a model folder names for images."""

import json

import pytest

from shardwise.config import ModelError
from shardwise.data.image_tokens import ImageTokens
from shardwise.data.synthetic import train_tokenizer


@pytest.fixture
def tokenizer():
    tokenizer = train_tokenizer(["2+3=5"], vocab_size=261)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[ROW]", "[END]"]})
    return tokenizer


def test_a_token_of_the_processor_is_its_own_or_that_of_transformers(tokenizer, tmp_path):
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_break_token": "[ROW]"}))
    tokens = ImageTokens(tmp_path, tokenizer, 7)
    assert tokens.configured("image_break_token", "?") == tokenizer.convert_tokens_to_ids("[ROW]")
    assert tokens.configured("image_end_token", "[END]") == tokenizer.convert_tokens_to_ids("[END]")
    with pytest.raises(ModelError, match=r"the tokenizer has no token '\[IMG\]', which the model's processor writes"):
        tokens.configured("image_token", "[IMG]")


def test_a_token_that_the_tokenizer_does_not_name_is_an_error_that_says_where_to_name_it(tokenizer, tmp_path):
    tokenizer.end_image_token = "[END]"
    tokens = ImageTokens(tmp_path, tokenizer, 7)
    assert tokens.named("end_image_token") == tokenizer.convert_tokens_to_ids("[END]")
    with pytest.raises(ModelError, match=r'what its start_image_token is, .* "extra_special_tokens" in tokenizer_conf'):
        tokens.named("start_image_token")


def test_a_mark_is_what_the_tokenizer_names_or_that_of_transformers_and_written_as_one_token(tokenizer, tmp_path):
    row, end = tokenizer.convert_tokens_to_ids(["[ROW]", "[END]"])
    tokens = ImageTokens(tmp_path, tokenizer, 7)
    assert tokens.named("row_token", "[ROW]") == row
    tokenizer.row_token = "[END]"
    assert tokens.named("row_token", "[ROW]") == end
    assert tokens.spelling("row_token", "[ROW]") == "[END]"
    assert tokens.encoded("[ROW]\n[END]") == [row, *tokenizer.encode("\n", add_special_tokens=False), end]
