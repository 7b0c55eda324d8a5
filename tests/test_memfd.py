import os

import torch

from shardwise.memfd import create_memory, mapped


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
