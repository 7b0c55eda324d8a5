"""What a process that does rows for another answers."""

import pickle
import threading
from multiprocessing import Pipe

import pytest
import torch

from shardwise.config import DataError
from shardwise.data.row_server import _dump_outcomes, _serve
from shardwise.types import Sample


def test_rows_whose_function_raises_are_left_out_of_the_answer():
    def half(number):
        if number % 2:
            raise DataError(f"{number} is odd")
        return number // 2

    ours, theirs = Pipe()
    serving = threading.Thread(target=_serve, args=(half, theirs))
    serving.start()
    assert ours.recv_bytes() == b""
    for rows, expected in (([4, 5, 6], {0: 2, 2: 3}), ([7], {}), ([8], {0: 4})):
        ours.send_bytes(pickle.dumps(rows))
        assert pickle.loads(ours.recv_bytes()) == expected
    ours.close()
    serving.join(timeout=60)
    assert not serving.is_alive()


@pytest.mark.parametrize("length", [0, 3])
def test_tensors_arrive_as_they_were_and_can_be_written_to(length):
    mask = torch.arange(length) > 0
    positions = torch.arange(6 * length).view(3, 2 * length)[:, ::2]
    sample = Sample(uid="a", token_ids=torch.arange(length), loss_mask=mask, position_ids=positions)
    found = pickle.loads(_dump_outcomes({0: (sample, sample)}))[0]
    assert found[0] is found[1]
    for name in ("token_ids", "loss_mask", "position_ids"):
        one, other = getattr(found[0], name), getattr(sample, name)
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        one.zero_()
    assert torch.equal(sample.token_ids, torch.arange(length))


def test_a_tensor_costs_little_more_than_its_bytes():
    """torch's own pickles have a kilobyte of a file's frame each."""
    tensors = [torch.full((100,), number) for number in range(64)]
    assert len(_dump_outcomes(dict(enumerate(tensors)))) < 64 * (800 + 200)
