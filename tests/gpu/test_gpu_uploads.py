"""What goes to the device waits in its queue, and the host goes on."""

import time

import torch

from shardwise.ops import PackedLayout
from shardwise.uploads import to_device

CYCLES = 1_000_000_000
"""Of the device, about 0.5 s: longer than any copy takes to be asked for."""
NUM_VALUES = 1 << 20
"""Above 64 KiB, which the driver stages by itself."""


def test_the_host_does_not_wait_for_the_device_to_take_a_copy(device):
    values = [torch.full((NUM_VALUES,), float(number)) for number in range(3)]
    for _ in range(2):  # pinned memory is taken from the system in the first, which may have to wait for it
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        start = time.monotonic()
        there = [to_device(one, device) for one in values]
        PackedLayout.from_cu_seqlens(torch.arange(1 << 16, dtype=torch.int32), device=device)
        is_asleep = not torch.cuda.current_stream().query()
        seconds = time.monotonic() - start
    assert is_asleep, f"copies took {seconds:.3f} s: they waited for the device"
    for number, one in enumerate(values):
        one.zero_()  # the copy is of what it was
        assert (there[number] == number).all()
