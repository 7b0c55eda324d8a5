"""Threads that are handed tensors wait for what was asked of the device before, whatever stream it was asked on."""

import pytest
import torch

pytest.importorskip("xxhash")  # which proves weights
from shardwise.checksum import checksum, checksums
from shardwise.transfer import Manifest

CYCLES = 300_000_000
"""Of the device, about 0.2 s: longer than a thread takes to begin."""


def slowly_filled(device, number):
    """A tensor that is not there yet."""
    tensor = torch.zeros(1000, device=device)
    torch.cuda._sleep(CYCLES)
    return tensor.fill_(number)


@pytest.mark.parametrize(
    "hashed", [lambda weights: dict(checksums(weights)), lambda weights: recorded(weights)], ids=["served", "sent"]
)
def test_weights_are_hashed_behind_what_computes_them(device, hashed):
    expected = {f"{number}": checksum(torch.full((1000,), float(number))) for number in (1, 2, 3)}
    with torch.Stream(device):
        assert hashed((name, slowly_filled(device, int(name))) for name in expected) == expected


def recorded(weights):
    manifest = Manifest(1)
    assert len(list(manifest.record(weights))) == 3
    return manifest.checksums
