import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.engine import ParallelDims
from shardwise.engine.gathering import gathered, gathered_in_order, gathered_regions
from shardwise.engine.shards import RowSharding, is_by_rows, local_box, local_shard, rows_by_replica
from shardwise.region import Region

WHOLE = RowSharding(None, 1, 0, torch.device("cpu"))


def assert_replicas_are_whole(parameter, num_replicas):
    """Of every copy all rows in their order, and of one of them those that are here."""
    replicas, here = rows_by_replica(parameter), local_box(parameter)[0]
    assert len(replicas) == num_replicas
    for shards in replicas:
        assert [row for rows, _ in shards for row in rows] == list(range(len(parameter)))
        assert all(len(rows) for rows, _ in shards)
    mine = [rows for shards in replicas for rows, rank in shards if rank == dist.get_rank()]
    assert mine == ([range(here.start, here.stop)] if here.stop > here.start else [])


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
        assert_replicas_are_whole(parameter, size // sharding.num_ranks)
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


def split_rows(fsdp_size, ep_size):
    """For parameters of 2, 4, 6, 8 and 12 rows of 2, split before they are sharded: what RowSharding says of the rows
    of every rank, and the elements that are here; the same put together again."""
    size = dist.get_world_size()
    mesh = ParallelDims.from_sizes(world_size=size, fsdp_size=fsdp_size, ulysses_size=1, ep_size=ep_size).build("cpu")
    wholes = [torch.arange(2.0 * rows).view(rows, 2) for rows in SPLIT_ROWS]
    model = nn.ParameterList(
        [nn.Parameter(distribute_tensor(whole, mesh.ep, [Shard(0)], src_data_rank=None)) for whole in wholes]
    )
    fully_shard(model, mesh=mesh.expert_fsdp)
    said, here = [], []
    for parameter, whole in zip(model, wholes, strict=True):
        sharding = RowSharding.of(parameter)
        assert is_by_rows(parameter)
        assert (sharding, sharding.num_parts) == (RowSharding.of(model[0]), ep_size)
        rows = [list(sharding.rows(len(whole), rank)) for rank in range(sharding.num_ranks)]
        own = sharding.rows(len(whole), sharding.rank)
        box = local_box(parameter)[0]
        assert (box.start, box.stop) == (own.start, own.stop) or (len(own), box.start) == (0, box.stop)
        assert_replicas_are_whole(parameter, size // sharding.num_ranks)
        said.append((rows, sharding.rank, sharding.first_element(parameter.shape)))
        here.append(local_shard(parameter.detach()).tolist())
        assert torch.equal(gathered(parameter, torch.float32), whole)
    assert all(
        torch.equal(*pair) for pair in zip(gathered_in_order((p, torch.float32) for p in model), wholes, strict=True)
    )
    needed = [[Region.box([(rank % 2, len(whole) - 1 + rank % 2), (0, 1)]) for rank in range(size)] for whole in wholes]
    parts = gathered_regions((p, torch.float32, of_ranks) for p, of_ranks in zip(model, needed, strict=True))
    for part, of_ranks, whole in zip(parts, needed, wholes, strict=True):
        assert torch.equal(part, of_ranks[dist.get_rank()].of(whole))
    return said, here


SPLIT_ROWS = (2, 4, 6, 8, 12)


@pytest.mark.parametrize(("world_size", "fsdp_size", "ep_size"), [(2, None, 2), (4, None, 2), (4, 2, 2)])
def test_rows_that_were_split_before_are_where_fully_shard_put_them(run_ranks, world_size, fsdp_size, ep_size):
    for rank, (said, here) in enumerate(run_ranks(split_rows, world_size, fsdp_size, ep_size)):
        for (rows, shard_rank, first), elements, total in zip(said, here, SPLIT_ROWS, strict=True):
            assert shard_rank == rank % (fsdp_size or world_size)
            assert sorted(row for of_rank in rows for row in of_rank) == list(range(total))
            assert elements == [[2.0 * row, 2.0 * row + 1] for row in rows[shard_rank]]
            assert not elements or first == elements[0][0]


def test_six_rows_in_two_parts_on_four_ranks():
    sharding = RowSharding(None, 4, 3, torch.device("cpu"), num_parts=2)
    assert [list(sharding.rows(6, rank)) for rank in range(4)] == [[0, 1], [3, 4], [2], [5]]
    by_rank = torch.tensor([[0.0, 1], [3, 4], [2, -1], [5, -1]])
    assert sharding.assembled(by_rank, torch.Size([6])).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("total", "num_ranks", "num_parts"), [(7, 4, 1), (5, 4, 1), (6, 4, 2), (2, 8, 1), (0, 2, 1)])
def test_bounds_are_those_of_the_rows_of_every_rank(total, num_ranks, num_parts):
    sharding = RowSharding(None, num_ranks, 0, torch.device("cpu"), num_parts)
    rows = [sharding.rows(total, rank) for rank in range(num_ranks)]
    assert [range(*bounds) for bounds in zip(*sharding.bounds(total), strict=True)] == rows


def test_plain_tensors_are_whole():
    plain = nn.Parameter(torch.zeros(5, 2))
    assert RowSharding.of(plain) == WHOLE
    assert local_shard(plain) is plain
    assert (WHOLE.num_rows(5, 0), WHOLE.first_element(torch.Size([]))) == (5, 0)


def replicated():
    mesh = ParallelDims.from_sizes(world_size=2, fsdp_size=None, ulysses_size=1).build("cpu").fsdp
    whole = distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])
    assert_replicas_are_whole(whole, 2)
    return isinstance(whole, DTensor), RowSharding.of(whole) == WHOLE


def test_replicated_parameters_are_whole(run_ranks):
    assert run_ranks(replicated, 2) == [(True, True)] * 2


def copies_of_plain_tensors():
    return [rows_by_replica(torch.zeros(shape)) for shape in ((), (3, 2), (0, 2))]


def test_every_rank_holds_a_copy_of_a_plain_tensor(run_ranks):
    number = [[(range(1), 0)], [(range(1), 1)]]
    matrix = [[(range(3), 0)], [(range(3), 1)]]
    nothing = [[], []]
    assert run_ranks(copies_of_plain_tensors, 2) == [[number, matrix, nothing]] * 2
