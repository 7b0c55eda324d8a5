import pytest
import torch
import torch.distributed as dist

from shardwise.config import ConfigError
from shardwise.engine import ParallelDims, take_device


@pytest.mark.parametrize(
    ("world_size", "fsdp_size", "ulysses_size", "expected"),
    [
        (1, None, 1, ParallelDims(dp_replicate=1, dp_shard=1, sp=1)),
        (8, None, 1, ParallelDims(dp_replicate=1, dp_shard=8, sp=1)),
        (8, 8, 1, ParallelDims(dp_replicate=1, dp_shard=8, sp=1)),
        (8, 2, 1, ParallelDims(dp_replicate=4, dp_shard=2, sp=1)),
        (8, 1, 1, ParallelDims(dp_replicate=8, dp_shard=1, sp=1)),
        (8, None, 2, ParallelDims(dp_replicate=1, dp_shard=4, sp=2)),
        (8, None, 8, ParallelDims(dp_replicate=1, dp_shard=1, sp=8)),
        (8, 4, 2, ParallelDims(dp_replicate=2, dp_shard=2, sp=2)),
        (8, 2, 2, ParallelDims(dp_replicate=4, dp_shard=1, sp=2)),
        (12, 6, 3, ParallelDims(dp_replicate=2, dp_shard=2, sp=3)),
    ],
)
def test_sizes_multiply_to_the_world_size(world_size, fsdp_size, ulysses_size, expected):
    """Trap 20: 1 means one rank and never "all"."""
    dims = ParallelDims.from_sizes(world_size=world_size, fsdp_size=fsdp_size, ulysses_size=ulysses_size)
    assert dims == expected
    assert dims.dp_replicate * dims.dp_shard * dims.sp == world_size


def test_ranks_that_share_experts_are_among_those_that_share_a_copy_of_the_model():
    dims = ParallelDims.from_sizes(world_size=8, fsdp_size=4, ulysses_size=1, ep_size=2)
    assert dims == ParallelDims(dp_replicate=2, dp_shard=4, sp=1, ep=2)
    for fsdp_size, key in ((None, "the world size"), (8, "engine.fsdp_size")):
        with pytest.raises(ConfigError) as error:
            ParallelDims.from_sizes(world_size=8, fsdp_size=fsdp_size, ulysses_size=1, ep_size=3)
        assert str(error.value) == (
            f"engine.ep_size=3 does not divide the 8 ranks that share one copy of the model ({key}); use 1, 2, 4 or 8"
        )


@pytest.mark.parametrize(
    ("world_size", "fsdp_size", "ulysses_size", "message"),
    [
        (
            12,
            5,
            1,
            "engine.fsdp_size=5 does not divide the world size 12; use 1, 2, 3, 4, 6 or 12 (12 = shard over all ranks)",
        ),
        (2, 4, 1, "engine.fsdp_size=4 does not divide the world size 2; use 1 or 2 (2 = shard over all ranks)"),
        (1, 2, 1, "engine.fsdp_size=2 does not divide the world size 1; use 1 (1 = shard over all ranks)"),
        (
            4,
            None,
            3,
            "engine.ulysses_size=3 does not divide the 4 ranks that share one copy of the model (the world size); use "
            "engine.ulysses_size=1, 2 or 4",
        ),
        (
            8,
            2,
            4,
            "engine.ulysses_size=4 does not divide the 2 ranks that share one copy of the model (engine.fsdp_size); "
            "use engine.ulysses_size=1 or 2, or engine.fsdp_size=4 or 8",
        ),
        (
            4,
            1,
            2,
            "engine.ulysses_size=2 does not divide the 1 ranks that share one copy of the model (engine.fsdp_size); "
            "use engine.ulysses_size=1, or engine.fsdp_size=2 or 4",
        ),
    ],
)
def test_impossible_sizes_are_refused_with_the_possible_ones(world_size, fsdp_size, ulysses_size, message):
    with pytest.raises(ConfigError) as error:
        ParallelDims.from_sizes(world_size=world_size, fsdp_size=fsdp_size, ulysses_size=ulysses_size)
    assert str(error.value) == message


def neighbours(fsdp_size, ulysses_size):
    dims = ParallelDims.from_sizes(world_size=dist.get_world_size(), fsdp_size=fsdp_size, ulysses_size=ulysses_size)
    mesh = dims.build("cpu")
    groups = {name: dist.get_process_group_ranks(mesh.fsdp.get_group(name)) for name in mesh.fsdp.mesh_dim_names}
    if mesh.sp_group is not None:
        groups["sp"] = dist.get_process_group_ranks(mesh.sp_group)
        assert groups["sp"][dist.get_rank(mesh.sp_group)] == dist.get_rank()
    return groups


def test_neighbouring_ranks_share_a_copy_of_the_model(run_ranks):
    """Ranks of one host are neighbours: gathering stays inside it, and only gradients go between replicas."""
    assert run_ranks(neighbours, 4, None, 1) == [{"fsdp": [0, 1, 2, 3]}] * 4
    assert run_ranks(neighbours, 4, 2, 1) == [
        {"dp_replicate": [0, 2], "fsdp": [0, 1]},
        {"dp_replicate": [1, 3], "fsdp": [0, 1]},
        {"dp_replicate": [0, 2], "fsdp": [2, 3]},
        {"dp_replicate": [1, 3], "fsdp": [2, 3]},
    ]


def test_fsdp_size_of_one_only_replicates(run_ranks):
    assert run_ranks(neighbours, 4, 1, 1) == [{"dp_replicate": [0, 1, 2, 3], "fsdp": [rank]} for rank in range(4)]


def test_neighbouring_ranks_share_sequences_and_all_of_a_copy_share_weights(run_ranks):
    """The controller gives neighbours the same batch, and attention's all-to-all is the densest traffic."""
    assert run_ranks(neighbours, 4, None, 2) == [
        {"fsdp": [0, 1, 2, 3], "sp": [0, 1]},
        {"fsdp": [0, 1, 2, 3], "sp": [0, 1]},
        {"fsdp": [0, 1, 2, 3], "sp": [2, 3]},
        {"fsdp": [0, 1, 2, 3], "sp": [2, 3]},
    ]
    assert run_ranks(neighbours, 4, None, 4) == [{"fsdp": [0, 1, 2, 3], "sp": [0, 1, 2, 3]}] * 4
    assert run_ranks(neighbours, 4, 2, 2) == [
        {"dp_replicate": [0, 2], "fsdp": [0, 1], "sp": [0, 1]},
        {"dp_replicate": [1, 3], "fsdp": [0, 1], "sp": [0, 1]},
        {"dp_replicate": [0, 2], "fsdp": [2, 3], "sp": [2, 3]},
        {"dp_replicate": [1, 3], "fsdp": [2, 3], "sp": [2, 3]},
    ]


def expert_neighbours(fsdp_size, ulysses_size, ep_size):
    mesh = ParallelDims.from_sizes(
        world_size=dist.get_world_size(), fsdp_size=fsdp_size, ulysses_size=ulysses_size, ep_size=ep_size
    ).build("cpu")
    names = mesh.expert_fsdp.mesh_dim_names
    groups = {name: dist.get_process_group_ranks(mesh.expert_fsdp.get_group(name)) for name in names}
    return groups | {"ep": None if mesh.ep is None else dist.get_process_group_ranks(mesh.ep.get_group())}


def test_neighbouring_ranks_share_experts_and_every_second_one_their_weights(run_ranks):
    """Tokens travel between neighbours, inside a host."""
    assert run_ranks(expert_neighbours, 4, None, 1, 1) == [{"fsdp": [0, 1, 2, 3], "ep": None}] * 4
    for ulysses_size in (1, 2, 4):
        assert run_ranks(expert_neighbours, 4, None, ulysses_size, 2) == [
            {"expert_shard": [0, 2], "ep": [0, 1]},
            {"expert_shard": [1, 3], "ep": [0, 1]},
            {"expert_shard": [0, 2], "ep": [2, 3]},
            {"expert_shard": [1, 3], "ep": [2, 3]},
        ]
    assert run_ranks(expert_neighbours, 4, 2, 1, 2) == [
        {"dp_replicate": [0, 2], "expert_shard": [0], "ep": [0, 1]},
        {"dp_replicate": [1, 3], "expert_shard": [1], "ep": [0, 1]},
        {"dp_replicate": [0, 2], "expert_shard": [2], "ep": [2, 3]},
        {"dp_replicate": [1, 3], "expert_shard": [3], "ep": [2, 3]},
    ]


def num_groups(sizes):
    """Of this process, after meshes of these sizes were built one after the other."""
    for fsdp_size, ulysses_size in sizes:
        ParallelDims.from_sizes(world_size=4, fsdp_size=fsdp_size, ulysses_size=ulysses_size).build("cpu")
    return dist.get_pg_count()


def test_engines_of_the_same_sizes_share_their_process_groups(run_ranks):
    """With NCCL each group would have buffers of its own."""
    for sizes in ([(2, 2)], [(2, 1), (None, 2)]):
        assert run_ranks(num_groups, 4, sizes * 3) == run_ranks(num_groups, 4, sizes)


def timeouts(fsdp_size, ulysses_size, ep_size):
    """Of the groups of an engine, and of the job."""

    def timeout(group):
        return group._get_backend(torch.device("cpu")).options._timeout

    sizes = {"fsdp_size": fsdp_size, "ulysses_size": ulysses_size, "ep_size": ep_size}
    mesh = ParallelDims.from_sizes(world_size=dist.get_world_size(), **sizes).build("cpu")
    return [timeout(group) for group in mesh.groups], timeout(dist.group.WORLD)


@pytest.mark.parametrize(
    ("sizes", "num_groups"), [((2, 1, 1), 2), ((None, 2, 1), 2), ((2, 2, 1), 3), ((2, 1, 2), 4)], ids=str
)
def test_no_group_waits_longer_for_a_rank_than_the_whole_job(run_ranks, sizes, num_groups):
    for found, of_job in run_ranks(timeouts, 4, *sizes):
        assert found == [of_job] * num_groups


def test_take_device_is_the_accelerator_of_that_number_made_current_or_the_cpu(monkeypatch):
    """A GPU of NVIDIA's does without the attention that plans anew for every shape."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert take_device(3) == torch.device("cpu")
    current = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert take_device(3) == torch.device("xpu", 3)
    assert current == [3]
    assert torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    try:
        assert take_device(2) == torch.device("cuda", 2)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    with pytest.raises(ConfigError, match="local rank 4 has no accelerator: this machine has 4; start at most 4 ranks"):
        take_device(4)
