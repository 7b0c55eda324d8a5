"""Which rank writes which part: every row once, shards without rows not at all, the same plan on every rank."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardwise.engine.files.state_plan import planned_cuts


def planned(shards, replicas):
    """The parts of every tensor."""
    mesh = init_device_mesh("cpu", (replicas, shards))
    layout = [Replicate(), Shard(0)]
    cuts = planned_cuts(
        {
            "sharded": distribute_tensor(torch.zeros(5, 3), mesh, layout),
            "short": distribute_tensor(torch.zeros(1, 3), mesh, layout),
            "alike": distribute_tensor(torch.zeros(5), mesh, layout),
            "none": distribute_tensor(torch.zeros(0, 2), mesh, layout),
            "number": torch.zeros((), dtype=torch.int64),
            "vector": torch.zeros(3),
            "another": torch.zeros(2),
            "number too": torch.zeros(()),
        }
    )
    assert replicas > 1 or cuts["alike"] is cuts["sharded"], "tensors share a cut"
    return {name: [tuple(part) for part in cut.parts] for name, cut in cuts.items()}


def rows(*parts):
    return [(start, stop, f"rank_{rank}.safetensors") for start, stop, rank in parts]


def test_each_rank_writes_its_own_rows_and_one_rank_what_all_hold(run_ranks):
    first, second = run_ranks(planned, 2, 2, 1)
    assert first == second
    assert first == {
        "sharded": rows((0, 3, 0), (3, 5, 1)),
        "short": rows((0, 1, 0)),
        "alike": rows((0, 3, 0), (3, 5, 1)),
        "none": [],
        "number": rows((0, 1, 0)),
        "vector": rows((0, 3, 1)),
        "another": rows((0, 2, 0)),
        "number too": rows((0, 1, 0)),
    }


def test_replicas_take_turns_so_that_they_write_about_as_many_bytes(run_ranks):
    first, *others = run_ranks(planned, 4, 2, 2)
    assert others == [first] * 3
    assert first == {
        "sharded": rows((0, 3, 0), (3, 5, 1)),
        "short": rows((0, 1, 2)),
        "alike": rows((0, 3, 2), (3, 5, 3)),
        "none": [],
        "number": rows((0, 1, 0)),
        "vector": rows((0, 3, 1)),
        "another": rows((0, 2, 2)),
        "number too": rows((0, 1, 0)),
    }
