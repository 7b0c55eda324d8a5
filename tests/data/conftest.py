import pytest
from vision_folders import vision_folder

from shardwise.config import ModelConfig
from shardwise.data import Vision, load_tokenizer
from shardwise.data.synthetic import train_tokenizer


@pytest.fixture
def tokenizer():
    """Bytes and special tokens only, so that every character of ASCII text is one token."""
    return train_tokenizer(["2+3=5"], vocab_size=261)


@pytest.fixture(scope="session")
def seeing(tmp_path_factory):
    """Tokenizer and vision of a Qwen3-VL."""
    folder = tmp_path_factory.mktemp("model")
    vision_folder("qwen3_vl", folder)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    return {"tokenizer": tokenizer, "vision": Vision.load(folder, tokenizer)}
