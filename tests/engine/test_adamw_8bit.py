import importlib.util
import shutil

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from shardwise.config import ConfigError, OptimizerConfig
from shardwise.engine import ParallelDims, adamw_8bit
from shardwise.engine.optimizer import ShardedOptimizer

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None or shutil.which("g++") is None,
    reason="needs torchao, and a C++ compiler for its compiled kernel",
)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(adamw_8bit, "_import", lambda name: None)
    with pytest.raises(ConfigError) as error:
        ShardedOptimizer(nn.Linear(2, 2), OptimizerConfig(optimizer="adamw_8bit"), total_steps=1)
    assert str(error.value) == (
        "trainer.optimizer=adamw_8bit needs torchao for weights on cpu, and cannot import it; pip install torchao, or "
        "set trainer.optimizer to adamw or adamw_cpu"
    )


class PlainSGD(torch.optim.SGD):
    """Refuses DTensors and tensors without elements, as the kernels of bitsandbytes do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                assert type(parameter.data) is torch.Tensor
                assert parameter.grad is None or parameter.numel() > 0
        return super().step(closure)


def moved_through_aliases():
    """Two ranks, one of them without a row of the second weight: the weights after a step, and after one that follows a
    move to new memory."""
    mesh = ParallelDims.from_sizes(world_size=2, fsdp_size=None, ulysses_size=1).build("cpu").fsdp
    model = nn.ParameterList([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(1, 2))])
    fully_shard(model, mesh=mesh)
    optimizer = adamw_8bit.on_local_shards(PlainSGD, [{"params": list(model), "lr": 0.5}], lr=0.0)
    seen = []
    for _ in range(2):
        for parameter in model:
            ones = torch.ones(parameter.shape)
            parameter.grad = distribute_tensor(ones, parameter.device_mesh, parameter.placements)
        optimizer.step()
        seen.append([parameter.full_tensor().unique().tolist() for parameter in model])
        for parameter in model:
            with torch.no_grad():
                parameter.to_local().data = parameter.to_local().clone()
    aliases = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return seen, [(alias.numel(), alias.grad) for alias in aliases]


def test_steps_reach_the_memory_of_the_shards_wherever_it_is(run_ranks):
    assert run_ranks(moved_through_aliases, 2) == [([[[0.5], [0.5]], [[0.0], [0.0]]], [(0, None)] * 2)] * 2


NUM_STEPS = 20


def gap_to_float32():
    """Trains on the ranks in 8 bits what AdamW trains whole, from the same gradients; the last layer has one row.

    Returns:
        the L2 distance of the two movements over the length of the exact one, and the bytes of this rank's states in 8
        bits and of all states in float32.
    """
    torch.manual_seed(0)
    sizes = [(128, 256), (256, 128), (128, 1)]
    model, reference = (nn.Sequential(*(nn.Linear(*size) for size in sizes)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    start = [parameter.detach().clone() for parameter in reference.parameters()]
    fully_shard(model)
    settings = {"learning_rate": 1e-3, "weight_decay": 0.1, "lr_schedule": "linear", "max_grad_norm": None}
    ours = ShardedOptimizer(model, OptimizerConfig(optimizer="adamw_8bit", **settings), total_steps=NUM_STEPS)
    theirs = ShardedOptimizer(reference, OptimizerConfig(**settings), total_steps=NUM_STEPS)
    for step in range(NUM_STEPS):
        reference(torch.randn(32, 128, generator=torch.Generator().manual_seed(step))).sub(1).square().mean().backward()
        for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
            parameter.grad = distribute_tensor(whole.grad.clone(), parameter.device_mesh, parameter.placements)
        ours.step()
        theirs.step()
    ends = zip(model.parameters(), reference.parameters(), start, strict=True)
    movements = [(p.full_tensor().detach() - first, q.detach() - first) for p, q, first in ends]
    in_8bit, exact = (torch.cat([pair[side].flatten() for pair in movements]).double() for side in (0, 1))
    gap = ((in_8bit - exact).norm() / exact.norm()).item()
    return gap, *(sum(tensor.nbytes for tensor in optimizer.state_tensors()) for optimizer in (ours, theirs))


@needs_torchao
@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
def test_torchaos_adamw_follows_float32_in_about_a_quarter_of_the_memory(run_ranks, world_size):
    """Measured: the movements differ by 1.5 %, in 0.27 of the bytes on one rank; two ranks give the same number."""
    results = run_ranks(gap_to_float32, world_size, timeout_seconds=300)
    for gap, num_bytes, num_float32_bytes in results:
        assert 0 < gap < 0.03
        assert num_bytes * world_size < 0.29 * num_float32_bytes
