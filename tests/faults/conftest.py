from pathlib import Path

import pytest
from runs import assets, command, job, marked, metrics_of, shell, start

from shardwise.controller.process_group import Rank, process_group
from shardwise.data.synthetic import build_model_folder, train_tokenizer

__all__ = ["assets", "command", "job", "marked", "metrics_of", "shell", "start"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = train_tokenizer(["2+3=5"], vocab_size=261)
    build_model_folder(
        folder, tokenizer=tokenizer, hidden_size=16, num_layers=1, intermediate_size=32, max_position_embeddings=32
    )
    return folder


@pytest.fixture
def alone():
    """This process is a group of one rank."""
    with process_group(Rank(0, 1, 0), device_type="cpu", timeout_seconds=60):
        yield
