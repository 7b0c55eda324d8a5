"""One GPU, NCCL with a world of 1. Without a CUDA device every test of this folder is skipped.

Imports torch, transformers and what the engine needs, so that `make gpu-test` runs on a machine that has little more.
"""

import os

import pytest
import torch

from shardwise.controller.process_group import Rank, process_group
from shardwise.engine import take_device


@pytest.fixture(scope="session", autouse=True)
def device():
    """The first GPU, with a process group around it."""
    if not torch.cuda.is_available():
        pytest.skip("tests/gpu needs a CUDA device, and this machine has none")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = take_device(0)
    with process_group(Rank(0, 1, 0), device_type=device.type, timeout_seconds=120):
        yield device


@pytest.fixture
def folder(tmp_path):
    """A small random Qwen3 with grouped queries, wide enough for FlashAttention."""
    from small_gpu_model import save_model

    return save_model(tmp_path)
