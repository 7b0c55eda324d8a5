import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shardwise.engine import ParallelDims
from shardwise.engine.shards import RowSharding, local_shard

WHOLE = RowSharding(None, 1, 0, torch.device("cpu"))


def sharded_rows(fsdp_size):
    """For parameters of 1, 3, 4, 7 and 9 rows of 2: what RowSharding says of them, and the elements that are here."""
    size = dist.get_world_size()
    mesh = ParallelDims.from_sizes(world_size=size, fsdp_size=fsdp_size, ulysses_size=1).build("cpu").fsdp
    wholes = [torch.arange(2.0 * rows).view(rows, 2) for rows in (1, 3, 4, 7, 9)]
    model = nn.ParameterList([nn.Parameter(whole.clone()) for whole in wholes])
    fully_shard(model, mesh=mesh)
    said, here = [], []
    for parameter, whole in zip(model, wholes, strict=True):
        sharding = RowSharding.of(parameter)
        assert sharding == RowSharding.of(model[0]), "parameters on one mesh have one sharding"
        num_rows = [sharding.num_rows(len(whole), rank) for rank in range(sharding.num_ranks)]
        said.append((num_rows, sharding.rank, sharding.first_element(parameter.shape)))
        here.append(local_shard(parameter.detach()).flatten().tolist())
    return said, here


@pytest.mark.parametrize(("world_size", "fsdp_size"), [(1, None), (2, None), (4, None), (4, 2)])
def test_rows_are_where_fully_shard_put_them(run_ranks, world_size, fsdp_size):
    shard_size = fsdp_size or world_size
    for rank, (said, here) in enumerate(run_ranks(sharded_rows, world_size, fsdp_size)):
        for (num_rows, shard_rank, first), elements, total in zip(said, here, (1, 3, 4, 7, 9), strict=True):
            assert shard_rank == rank % shard_size
            assert (len(num_rows), sum(num_rows)) == (shard_size, total)
            assert len(elements) == 2 * num_rows[shard_rank]
            assert elements == [float(first + k) for k in range(len(elements))]


def test_seven_rows_on_four_ranks_and_five_on_four():
    sharding = RowSharding(None, 4, 3, torch.device("cpu"))
    assert [sharding.num_rows(7, rank) for rank in range(4)] == [2, 2, 2, 1]
    assert [sharding.num_rows(5, rank) for rank in range(4)] == [2, 2, 1, 0]
    assert sharding.first_element(torch.Size([7, 3, 2])) == 6 * 6


def test_plain_tensors_are_whole():
    plain = nn.Parameter(torch.zeros(5, 2))
    assert RowSharding.of(plain) == WHOLE
    assert local_shard(plain) is plain
    assert (WHOLE.num_rows(5, 0), WHOLE.first_element(torch.Size([]))) == (5, 0)


def replicated():
    mesh = ParallelDims.from_sizes(world_size=2, fsdp_size=None, ulysses_size=1).build("cpu").fsdp
    whole = distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])
    return isinstance(whole, DTensor), RowSharding.of(whole) == WHOLE


def test_replicated_parameters_are_whole(run_ranks):
    assert run_ranks(replicated, 2) == [(True, True)] * 2
