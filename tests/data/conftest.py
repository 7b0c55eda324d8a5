import pytest

from shardwise.data.synthetic import train_tokenizer


@pytest.fixture
def tokenizer():
    """Bytes and special tokens only, so that every character of ASCII text is one token."""
    return train_tokenizer(["2+3=5"], vocab_size=261)
