import numpy as np
import pytest
import torch
import xxhash
from stand_in_streams import OnAccelerator, Streams

from shardwise import checksum as module
from shardwise.checksum import checksum, checksums


def test_checksum_is_xxh3_of_the_bytes_in_memory_order():
    values = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert checksum(values) == xxhash.xxh3_64_intdigest(np.arange(12, dtype="<f4").tobytes())
    assert checksum(values.t()) == xxhash.xxh3_64_intdigest(np.arange(12, dtype="<f4").reshape(3, 4).T.tobytes())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_checksum_sees_every_single_bit(dtype):
    data = torch.zeros(5, dtype=dtype)
    seen = {checksum(data)}
    raw = data.view(torch.uint8)
    for place in range(raw.numel()):
        for bit in range(1 if dtype == torch.bool else 8):
            raw[place] ^= 1 << bit
            seen.add(checksum(data))
            raw[place] ^= 1 << bit
    assert len(seen) == 1 + raw.numel() * (1 if dtype == torch.bool else 8)


def test_many_tensors_keep_their_order_and_few_are_held_at_a_time(monkeypatch):
    """Some engines make a tensor for every name that they are asked for. Small ones are held until they have as many
    bytes together as may be."""
    monkeypatch.setattr(module, "_WAITING_BYTES", 120_000)
    num_bytes = []

    def made():
        for index in range(50):
            tensor = torch.full((1 + 1000 * (index % 7),), index)
            num_bytes.append(tensor.nbytes)
            yield f"{index}", tensor

    found, most = [], 0
    for name, digest in checksums(made()):
        held = num_bytes[len(found) : -1]  # before the newest came
        most = max(most, len(held))
        assert len(held) <= module._MAX_THREADS or sum(held) <= 120_000
        found.append((name, digest))
    assert most > module._MAX_THREADS
    assert found == [(name, checksum(tensor)) for name, tensor in made()]


def test_what_cannot_be_read_has_a_name_and_no_checksum():
    tensor = torch.arange(4.0)
    assert dict(checksums([("a", tensor), ("b", tensor.to("meta"))])) == {"a": checksum(tensor), "b": None}


def test_threads_hash_behind_what_the_caller_has_asked_the_device_for(monkeypatch):
    streams, seen = Streams(), []
    streams.use("own")
    monkeypatch.setattr(torch.accelerator, "current_stream", streams.of_device)
    monkeypatch.setattr(module, "checksum", lambda tensor: seen.append(streams.current) or checksum(tensor))
    weights = [(f"{index}", torch.full((3,), index).as_subclass(OnAccelerator)) for index in range(9)]
    assert list(checksums(weights)) == [(name, checksum(tensor)) for name, tensor in weights]
    assert seen == ["own"] * 9
