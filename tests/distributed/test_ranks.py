"""The pool that the distributed tests stand on: it must be able to fail, by name, and to go on afterwards."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def sum_of_ranks(start):
    total = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(total)
    return float(total), dist.get_world_size(), torch.get_num_threads(), float(torch.rand(()))


def train_on_a_mesh():
    """Leaves behind what DTensor's caches hold: the mesh and its groups."""
    layer = torch.nn.Linear(8, 8)
    fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    layer(torch.ones(2, 8)).sum().backward()
    return float(torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0).full_tensor())


def raise_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"by rank {rank}")
    dist.all_reduce(torch.zeros(1))


def die_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def hang_on(rank):
    if dist.get_rank() == rank:
        time.sleep(60)


@pytest.mark.parametrize(("world_size", "total"), [(1, 10.0), (2, 21.0), (4, 46.0)])
def test_ranks_of_every_world_size_talk_to_each_other(run_ranks, world_size, total):
    results = run_ranks(sum_of_ranks, world_size, 10)
    torch.manual_seed(0)
    assert results == [(total, world_size, 1, float(torch.rand(())))] * world_size


def test_exception_of_one_rank_comes_first_with_its_traceback_and_frees_the_others(run_ranks):
    run_ranks(train_on_a_mesh, 4)  # the others have found each other before one of them fails
    start = time.monotonic()
    with pytest.raises(RankError, match=r"\Arank 2 raised:\n(.|\n)*in raise_on\n(.|\n)*ValueError: by rank 2\n"):
        run_ranks(raise_on, 4, 2)
    assert time.monotonic() - start < 5
    assert run_ranks(sum_of_ranks, 2, 0)[1][0] == 1.0


def test_hung_rank_is_named_with_its_stack_and_replaced(run_ranks):
    with pytest.raises(RankError, match=r"rank 1 did not answer within 0\.5 s:\n(.|\n)*in hang_on"):
        run_ranks(hang_on, 2, 1, timeout_seconds=0.5)
    with pytest.raises(RankError, match=r"rank 0 died with exit code -9"):
        run_ranks(die_on, 2, 0)
    assert run_ranks(sum_of_ranks, 2, 0)[1][0] == 1.0
