import pytest
import torch

from shardwise.uploads import to_device

CPU = torch.device("cpu")


@pytest.fixture
def pinned(monkeypatch):
    """What was copied to pinned memory, which a machine without an accelerator lacks."""
    found = []

    def pin_memory(tensor):
        found.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return found


def test_what_goes_to_an_accelerator_leaves_from_pinned_memory(pinned):
    tokens = torch.arange(5)
    there = to_device(tokens, torch.device("meta"))
    assert (there.device.type, there.shape, there.dtype) == ("meta", tokens.shape, tokens.dtype)
    assert [id(tensor) for tensor in pinned] == [id(tokens)]


def test_what_stays_on_the_host_or_is_there_already_is_not_copied(pinned):
    tokens, there = torch.arange(5), torch.empty(5, device="meta")
    assert to_device(tokens, CPU) is tokens
    assert to_device(there, torch.device("meta")) is there
    assert pinned == []
