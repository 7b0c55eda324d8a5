import pytest
import torch

from shardwise.ops import release_cached_blocks


@pytest.mark.parametrize("is_available", [True, False])
def test_blocks_are_released_where_there_is_an_accelerator(monkeypatch, is_available):
    """torch raises where there is none. What is released is seen in tests/gpu/test_gpu_embedded.py."""
    calls = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append("released"))
    release_cached_blocks()
    assert calls == ["released"] * is_available
