from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardwise.controller.process_group import Rank, connect
from shardwise.engine.staging import HostShards, StagingBuffers

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
    shards = HostShards(StagingBuffers())
    for name, tensor in tensors.items():
        shards.add(name, tensor, torch.bfloat16)
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


def test_buffers_are_kept_while_the_form_of_a_tensor_stays():
    buffers = StagingBuffers()
    first = buffers.copy("a", torch.ones(3))
    assert buffers.copy("a", torch.full((3,), 2.0)) is first
    assert first.tolist() == [2.0, 2.0, 2.0]
    assert buffers.copy("a", torch.ones(4)).shape == (4,)
    assert buffers.copy("b", torch.ones(4)) is not buffers.copy("a", torch.ones(4))
