import pytest
import torch
from tiny_models import tiny_folder
from transformers import AutoModelForSequenceClassification

from shardwise.controller.process_group import Rank, process_group


class Tokenizer:
    """Saves nothing. These models have no tokenizer; their padding is 0."""

    pad_token_id = 0

    def save_pretrained(self, _folder):
        return ()


@pytest.fixture
def alone(monkeypatch):
    """The process group of a rank that is the only one, whose models have no tokenizer."""
    monkeypatch.setattr("shardwise.recipes.rank.checkpoint_files.load_tokenizer", lambda _: Tokenizer())
    with process_group(Rank(0, 1, 0), device_type="cpu", timeout_seconds=60):
        yield


@pytest.fixture(scope="module")
def everyone(tmp_path_factory):
    """The folder of a language model, and beside it that of a reward model (`scorer`) with the same backbone."""
    folder = tiny_folder("llama", tmp_path_factory.mktemp("everyone") / "llama")
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    scorer.save_pretrained(folder.parent / "scorer")
    return folder
