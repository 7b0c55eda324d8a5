import threading
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardwise.controller.process_group import Rank, connect
from shardwise.engine import ParallelDims
from shardwise.engine.files.staging import Copies, HostShards, StagingBuffers

FULL = {
    "even": torch.arange(24.0).reshape(8, 3),
    "uneven": torch.arange(14.0).reshape(7, 2),
    "few rows": torch.arange(4.0).reshape(2, 2),
    "plain": torch.arange(5.0),
}


def whole_on_every_writer(store, replicas):
    """Shards of every tensor, which then change; what `whole` gives for every writer on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    links = connect("test", Rank(rank, size, rank), dist.FileStore(store, size), timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
    tensors = {
        name: full.clone() if name == "plain" else distribute_tensor(full, mesh, [Replicate(), Shard(0)])
        for name, full in FULL.items()
    }
    copies = Copies()
    shards = HostShards(StagingBuffers(copies))
    for name, tensor in tensors.items():
        shards.add(name, tensor, torch.bfloat16)
    copies.wait()
    for tensor in tensors.values():
        tensor.zero_()
    return [{name: shards.whole(name, writer, links) for name in FULL} for writer in range(size)]


@pytest.mark.parametrize(("size", "replicas"), [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)])
def test_only_the_writer_gets_the_whole_tensor_as_it_was(run_ranks, tmp_path, size, replicas):
    for rank, by_writer in enumerate(run_ranks(whole_on_every_writer, size, str(tmp_path / "store"), replicas)):
        for writer, tensors in enumerate(by_writer):
            for name, full in FULL.items():
                if rank == writer:
                    assert torch.equal(tensors[name], full.bfloat16()), (name, writer)
                    assert tensors[name].dtype == torch.bfloat16
                else:
                    assert tensors[name] is None


def split_rows_on_every_writer(store):
    """As above, of experts that two neighbours share."""
    rank, size = dist.get_rank(), dist.get_world_size()
    links = connect("test", Rank(rank, size, rank), dist.FileStore(store, size), timeout=timedelta(seconds=20))
    mesh = ParallelDims.from_sizes(world_size=size, fsdp_size=None, ulysses_size=1, ep_size=2).build("cpu")
    wholes = [torch.arange(2.0 * rows).view(rows, 2) for rows in (2, 6, 8)]
    model = nn.ParameterList(
        [nn.Parameter(distribute_tensor(whole, mesh.ep, [Shard(0)], src_data_rank=None)) for whole in wholes]
    )
    fully_shard(model, mesh=mesh.expert_fsdp)
    shards = HostShards(StagingBuffers(Copies()))
    for index, parameter in enumerate(model):
        shards.add(str(index), parameter, torch.float32)
    for writer in range(size):
        for index, whole in enumerate(wholes):
            found = shards.whole(str(index), writer, links)
            assert found is None if rank != writer else torch.equal(found, whole), (index, writer)
    return True


def test_rows_that_were_split_before_they_were_sharded_arrive_in_order(run_ranks, tmp_path):
    assert all(run_ranks(split_rows_on_every_writer, 4, str(tmp_path / "store")))


def test_buffers_are_kept_while_the_form_of_a_tensor_stays():
    buffers = StagingBuffers(Copies())
    first = buffers.copy("a", torch.ones(3))
    assert buffers.copy("a", torch.full((3,), 2.0)) is first
    buffers.copies.finish()
    assert first.tolist() == [2.0, 2.0, 2.0]
    assert buffers.copy("a", torch.ones(4)).shape == (4,)
    assert buffers.copy("b", torch.ones(4)) is not buffers.copy("a", torch.ones(4))


def test_whoever_changes_a_source_waits_for_its_copy_and_whoever_reads_the_copy_too():
    copies, begun = Copies(), threading.Event()
    copies._thread.submit(begun.wait)  # something that is copied before
    source, target = torch.ones(3), torch.zeros(3)
    copies.begin(target, source)
    with ThreadPoolExecutor(2) as others:
        try:
            waiting = [others.submit(copies.wait)]
            assert not wait(waiting, timeout=0.2).done
            waiting.append(others.submit(copies.finish))
            assert not wait(waiting, timeout=0.2).done, "although another thread waits already"
        finally:
            begun.set()
        assert not wait(waiting, timeout=20).not_done
    assert target.tolist() == [1.0, 1.0, 1.0]


def test_a_copy_that_fails_is_told_to_whoever_waits():
    copies = Copies()
    copies.begin(torch.zeros(3), torch.ones(4))
    with pytest.raises(RuntimeError, match="size of tensor"):
        copies.finish()
    with pytest.raises(RuntimeError, match="size of tensor"):
        copies.wait()


def names_not_finite():
    shards = HostShards(StagingBuffers(Copies()))
    shards.add("good", torch.ones(3), torch.float32)
    shards.add("bad", torch.tensor([1.0, float("nan")]), torch.bfloat16)
    shards.add("too large for its dtype", torch.tensor([1e6]), torch.float16)
    shards.add("bound", torch.tensor([float("inf")]), torch.float32)
    return shards.nonfinite_names(may_be_infinite={"bound"}), shards.nonfinite_names()


def test_what_is_not_finite_as_it_will_be_written_is_named(run_ranks):
    bad = ["bad", "too large for its dtype"]
    assert run_ranks(names_not_finite, 1) == [(bad, [*bad, "bound"])]
