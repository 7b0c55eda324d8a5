import pytest
import torch
import torch.distributed as dist

from shardwise.config import ConfigError
from shardwise.engine import ParallelDims, take_device


@pytest.mark.parametrize(
    ("world_size", "fsdp_size", "expected"),
    [
        (1, None, ParallelDims(dp_replicate=1, dp_shard=1, sp=1)),
        (8, None, ParallelDims(dp_replicate=1, dp_shard=8, sp=1)),
        (8, 8, ParallelDims(dp_replicate=1, dp_shard=8, sp=1)),
        (8, 2, ParallelDims(dp_replicate=4, dp_shard=2, sp=1)),
        (8, 1, ParallelDims(dp_replicate=8, dp_shard=1, sp=1)),
    ],
)
def test_sizes_multiply_to_the_world_size(world_size, fsdp_size, expected):
    """Trap 20: 1 means one rank and never "all"."""
    dims = ParallelDims.from_sizes(world_size=world_size, fsdp_size=fsdp_size, ulysses_size=1)
    assert dims == expected
    assert dims.dp_replicate * dims.dp_shard * dims.sp == world_size
    assert dims.dp_replicate * dims.dp_shard * dims.sp == world_size


@pytest.mark.parametrize(
    ("world_size", "fsdp_size", "message"),
    [
        (
            12,
            5,
            "engine.fsdp_size=5 does not divide the world size 12; use 1, 2, 3, 4, 6 or 12 (12 = shard over all ranks)",
        ),
        (2, 4, "engine.fsdp_size=4 does not divide the world size 2; use 1 or 2 (2 = shard over all ranks)"),
        (1, 2, "engine.fsdp_size=2 does not divide the world size 1; use 1 (1 = shard over all ranks)"),
    ],
)
def test_impossible_fsdp_size_is_refused_with_the_possible_ones(world_size, fsdp_size, message):
    with pytest.raises(ConfigError) as error:
        ParallelDims.from_sizes(world_size=world_size, fsdp_size=fsdp_size, ulysses_size=1)
    assert str(error.value) == message


def test_sequence_parallelism_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.ulysses_size=2: .* use 1$"):
        ParallelDims.from_sizes(world_size=4, fsdp_size=None, ulysses_size=2)


def neighbours(fsdp_size):
    dims = ParallelDims.from_sizes(world_size=dist.get_world_size(), fsdp_size=fsdp_size, ulysses_size=1)
    mesh = dims.build("cpu").fsdp
    return {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names}


def test_neighbouring_ranks_share_a_copy_of_the_model(run_ranks):
    """Ranks of one host are neighbours: gathering stays inside it, and only gradients go between replicas."""
    assert run_ranks(neighbours, 4, None) == [{"dp_shard": [0, 1, 2, 3]}] * 4
    assert run_ranks(neighbours, 4, 2) == [
        {"dp_replicate": [0, 2], "dp_shard": [0, 1]},
        {"dp_replicate": [1, 3], "dp_shard": [0, 1]},
        {"dp_replicate": [0, 2], "dp_shard": [2, 3]},
        {"dp_replicate": [1, 3], "dp_shard": [2, 3]},
    ]


def test_take_device_is_the_accelerator_of_that_number_made_current_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert take_device(3) == torch.device("cpu")
    current = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert take_device(3) == torch.device("xpu", 3)
    assert current == [3]
    with pytest.raises(ConfigError, match="local rank 4 has no accelerator: this machine has 4; start at most 4 ranks"):
        take_device(4)
