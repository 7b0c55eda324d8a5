"""Which rank writes which part: every element once, shards without elements not at all."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardwise.engine.files.safetensors_file import TensorSpec
from shardwise.engine.files.state_plan import StatePlan


def tensors_of(shards, replicas):
    mesh = init_device_mesh("cpu", (replicas, shards))
    return {
        "sharded": distribute_tensor(torch.zeros(5, 3), mesh, [Replicate(), Shard(0)]),
        "short": distribute_tensor(torch.zeros(1, 3), mesh, [Replicate(), Shard(0)]),
        "plain": torch.zeros((), dtype=torch.int64),
    }


def planned(shards, replicas):
    """What each rank writes, and the boxes of every tensor: (offsets, sizes, file)."""
    plan = StatePlan.of(tensors_of(shards, replicas))
    index = plan.index({}, {"step": 3})
    boxes = {name: sorted((p.offsets, p.sizes, p.file) for p in parts) for name, parts in index.parts.items()}
    return [plan.names_of(rank) for rank in range(shards * replicas)], boxes, index.specs, index.numbers


def test_each_rank_writes_its_own_rows_and_one_rank_what_all_hold(run_ranks):
    first, second = run_ranks(planned, 2, 2, 1)
    assert first == second
    by_rank, boxes, specs, numbers = first
    assert [set(names) - {"plain"} for names in by_rank] == [{"sharded", "short"}, {"sharded"}]
    assert sum("plain" in names for names in by_rank) == 1
    assert boxes["sharded"] == [
        ((0, 0), (3, 3), "rank_0.safetensors"),
        ((3, 0), (2, 3), "rank_1.safetensors"),
    ]
    assert boxes["short"] == [((0, 0), (1, 3), "rank_0.safetensors")]
    assert specs == {
        "sharded": TensorSpec(torch.float32, (5, 3)),
        "short": TensorSpec(torch.float32, (1, 3)),
        "plain": TensorSpec(torch.int64, ()),
    }
    assert numbers == {"step": 3}


def test_one_of_two_replicas_writes_a_shard(run_ranks):
    (by_rank, boxes, _, _), *others = run_ranks(planned, 4, 2, 2)
    assert all(other[0] == by_rank for other in others)
    assert sorted(name for names in by_rank for name in names) == ["plain", "sharded", "sharded", "short"]
    assert [(offsets, sizes) for offsets, sizes, _ in boxes["sharded"]] == [((0, 0), (3, 3)), ((3, 0), (2, 3))]


def holds(changed):
    tensors = tensors_of(2, 1)
    plan = StatePlan.of(tensors)
    return [plan.holds_for(tensors)] + [plan.holds_for(tensors | change) for change in changed]


def test_a_plan_holds_for_the_same_names_shapes_and_dtypes_only(run_ranks):
    changed = [{"more": torch.zeros(2)}, {"plain": torch.zeros(1, dtype=torch.int64)}, {"plain": torch.zeros(())}]
    assert run_ranks(holds, 2, changed) == [[True, False, False, False]] * 2
