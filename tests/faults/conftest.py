"""A tiny model, a run of it on real ranks, and disks that can be filled."""

import subprocess
from pathlib import Path

import pytest

from shardwise.data.synthetic import build_model_folder, train_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = train_tokenizer(["2+3=5"], vocab_size=261)
    build_model_folder(
        folder, tokenizer=tokenizer, hidden_size=16, num_layers=1, intermediate_size=32, max_position_embeddings=32
    )
    return folder


@pytest.fixture
def mount_point(tmp_path):
    """A folder that a test mounts a file system on; unmounted at the end. Skips where that is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
