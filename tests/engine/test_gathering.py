from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from shardwise.checksum import checksum
from shardwise.engine import ParallelDims
from shardwise.engine.gathering import gathered, gathered_in_order, gathered_regions
from shardwise.region import Region

SHAPES = [(5, 3), (1,), (2,), (7,), (2, 2, 3), (64, 8), (9, 1), (3, 4)]
"""Rows that no number of ranks divides, and fewer rows than ranks."""


def build(fsdp_size, offload):
    """Sharded parameters, and the same ones whole."""
    mesh = ParallelDims.from_sizes(world_size=dist.get_world_size(), fsdp_size=fsdp_size, ulysses_size=1).build("cpu")
    wholes = [torch.arange(torch.Size(shape).numel()).view(shape) / 3 + index for index, shape in enumerate(SHAPES)]
    model = nn.ParameterList([nn.Parameter(whole.clone()) for whole in wholes])
    fully_shard(
        model, mesh=mesh.fsdp, offload_policy=CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    )
    return model, wholes


def gather(fsdp_size, bucket_bytes, offload):
    """Whether everything arrives as it was, what belongs to a parameter itself, and how many collectives it took."""
    model, wholes = build(fsdp_size, offload)
    dtypes = [torch.float32, *4 * [torch.bfloat16], torch.float32, torch.float32, torch.float64]
    plain = torch.arange(3)
    asked = [*zip(model, dtypes, strict=True), (plain, plain.dtype)]
    with CommDebugMode() as collectives:
        found = list(gathered_in_order(asked, bucket_bytes=bucket_bytes))
    for tensor, (source, dtype), whole in zip(found, asked, [*wholes, plain], strict=True):
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        torch.testing.assert_close(tensor, whole.to(dtype), rtol=0, atol=0)
        assert checksum(tensor) == checksum(whole.to(dtype)), "its bytes can be viewed"
        tensor.zero_()  # what is received is the receiver's
        torch.testing.assert_close(gathered(source, torch.float64), whole.double(), rtol=1e-7, atol=0)
    memory = {tensor.untyped_storage().data_ptr() for tensor in found}
    assert len(memory) == len(found), "of each its own"
    return collectives.get_total_counts()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("world_size", "fsdp_size"), [(1, None), (2, None), (4, None), (4, 2), (2, 1)])
def test_trap_29_every_tensor_arrives_whole_over_few_collectives_and_is_the_receivers_own(
    run_ranks, world_size, fsdp_size, offload
):
    for number in run_ranks(gather, world_size, fsdp_size, 1 << 20, offload):
        sharded = (fsdp_size or world_size) > 1
        assert number == (4 if sharded else 0), "neighbours of one dtype share a collective"


def test_a_bucket_ends_where_it_would_be_too_large(run_ranks):
    # bytes: 60 | 2, 4, 14, 24 | 2048 | 36 | 96
    assert run_ranks(gather, 2, None, 64, False) == [5, 5]
    assert run_ranks(gather, 2, None, 30, False) == [6, 6]
    assert run_ranks(gather, 2, None, 1, False) == [8, 8]


def gather_columns():
    """A parameter that is sharded otherwise than by rows, gathered; whether it is still itself afterwards."""
    size = dist.get_world_size()
    mesh = ParallelDims.from_sizes(world_size=size, fsdp_size=None, ulysses_size=1).build("cpu").fsdp
    whole = torch.arange(12.0).view(3, 4)
    weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)]))
    found = gathered(weight, torch.float32)
    is_equal = torch.equal(found, whole)
    found.zero_()
    return is_equal, torch.equal(gathered(weight, torch.float32), whole)


@pytest.mark.parametrize("world_size", [1, 2])
def test_columns_are_gathered_too(run_ranks, world_size):
    assert run_ranks(gather_columns, world_size) == [(True, True)] * world_size


REGIONS = [
    lambda rank: Region.box([(rank, rank + 2), (0, 3)]),
    lambda rank: Region.whole((1,)),
    lambda rank: Region.box([(0, rank % 2 + 1)]),
    lambda rank: Region.box([(0, 1 + rank)]) | Region.box([(5, 7)]),
    lambda rank: Region.box([(rank % 2, rank % 2 + 1), (0, 2), (1, 3)]),
    lambda rank: Region.box([(0, 64), (2 * rank, 2 * rank + 2)]),
    lambda rank: Region.box([(2, 2), (0, 1)]),  # nothing
    None,
]
"""What a rank needs of each of SHAPES; None: all of it."""


def gather_regions(fsdp_size, bucket_bytes, offload):
    """Whether exactly what each rank asks for arrives, and how many exchanges it took."""
    model, wholes = build(fsdp_size, offload)
    dtypes = [torch.float32, *4 * [torch.bfloat16], torch.float32, torch.float32, torch.float64]
    ranks = range(dist.get_world_size())
    regions = [None if region is None else [region(rank) for rank in ranks] for region in REGIONS]
    plain = torch.arange(12).view(3, 4)
    asked = [
        *zip(model, dtypes, regions, strict=True),
        (plain, plain.dtype, [Region.box([(0, 2), (1, 2)])] * len(ranks)),
    ]
    with CommDebugMode() as collectives:
        found = list(gathered_regions(asked, bucket_bytes=bucket_bytes))
    for tensor, (_, dtype, needed), whole in zip(found, asked, [*wholes, plain], strict=True):
        expected = whole if needed is None else needed[dist.get_rank()].of(whole)
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        torch.testing.assert_close(tensor, expected.to(dtype), rtol=0, atol=0)
        tensor.zero_()  # what is received is the receiver's
    again = list(gathered_in_order(zip(model, dtypes, strict=True)))
    assert all(
        torch.equal(tensor, whole.to(dtype)) for tensor, whole, dtype in zip(again, wholes, dtypes, strict=False)
    )
    return collectives.get_comm_counts()[torch.ops.c10d.alltoall_base_], collectives.get_total_counts()


@pytest.mark.parametrize(("bucket_bytes", "num_exchanges"), [(1, 7), (1 << 20, 3)])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("world_size", "fsdp_size"), [(1, None), (2, None), (4, None), (4, 2), (2, 1)])
def test_each_rank_is_sent_what_it_needs(run_ranks, world_size, fsdp_size, offload, bucket_bytes, num_exchanges):
    is_sharded = (fsdp_size or world_size) > 1
    for counts in run_ranks(gather_regions, world_size, fsdp_size, bucket_bytes, offload):
        assert counts == ((num_exchanges, num_exchanges + 1) if is_sharded else (0, 0)), "one tensor is needed whole"


def copies_for_ranks_that_need_the_same():
    """How often a rank copies of its rows of four tensors, of which it sends each to four ranks."""
    model, _ = build(None, offload=False)
    halves = [Region.box([(0, 64), (0, 4)]), Region.box([(0, 64), (4, 8)])]
    same = [halves[0], halves[1], halves[0], halves[1]]
    with patch.object(Region, "of", autospec=True, side_effect=Region.of) as copied:
        found = list(gathered_regions([(model[5], torch.float32, same)] * 4, bucket_bytes=1 << 20))
    assert [tensor.tolist() for tensor in found] == [found[0].tolist()] * 4
    return copied.call_count


def test_what_many_ranks_need_is_copied_once(run_ranks):
    """For a thousand ranks, copies for each took most of a weight switch."""
    assert run_ranks(copies_for_ranks_that_need_the_same, 4) == [2 * 4] * 4
