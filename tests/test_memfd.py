import os

import pytest
import torch

from shardwise.memfd import SharedTensors, create_memory, mapped


def test_what_one_process_writes_is_there_in_another():
    descriptor = create_memory(8)
    ours = mapped(descriptor)
    if os.fork() == 0:
        mapped(descriptor).fill_(7)
        os._exit(0)
    os.wait()
    assert ours.tolist() == [7] * 8


def test_memory_outlives_its_descriptor_as_long_as_it_is_mapped_and_has_no_name():
    before = set(os.listdir("/dev/shm"))
    descriptor = create_memory()
    os.ftruncate(descriptor, 4)
    memory = mapped(descriptor)
    os.close(descriptor)
    memory.view(torch.int32).fill_(5)
    assert memory.tolist() == [5, 0, 0, 0]
    assert set(os.listdir("/dev/shm")) == before


def test_tensors_are_moved_into_memory_that_others_may_write_to():
    layer = torch.nn.Linear(3, 5)
    layer.tied = layer.weight
    values = [layer.weight.clone(), layer.bias.clone()]
    turned = torch.arange(6.0).view(2, 3).t()
    shared = SharedTensors([*layer.parameters(), turned])
    assert all(map(torch.equal, (layer.weight, layer.bias), values))
    places = shared.places({**layer.state_dict(), "turned": turned, "meta": torch.empty(2, device="meta")})
    assert places == {"weight": (0, 60), "bias": (64, 20), "tied": (0, 60)}
    mapped(shared.descriptor)[64:68].view(torch.float32).fill_(7)
    assert layer.bias[0] == 7
    assert layer.tied is layer.weight
    descriptor = shared.descriptor
    del shared
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert layer.bias[0] == 7, "the memory lives as long as what lies in it"
