import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from shardwise.config import OptimizerConfig, TrainingError
from shardwise.engine import ParallelDims
from shardwise.engine.optimizer import ShardedOptimizer, global_grad_norm

def norm_of_sharded_gradients(fsdp_size):
    """Gradients whose dim 0 is 1, 3 and 7 rows: on four ranks some shards are empty."""
    size = dist.get_world_size()
    mesh = ParallelDims.from_sizes(world_size=size, fsdp_size=fsdp_size, ulysses_size=1).mesh("cpu")
    model = nn.ParameterDict({str(rows): nn.Parameter(torch.zeros(rows, 2)) for rows in (1, 3, 7)})
    fully_shard(model, mesh=mesh)
    torch.manual_seed(3)
    whole = {rows: torch.randn(rows, 2) for rows in (1, 3, 7)}
    for rows, gradient in whole.items():
        parameter = model[str(rows)]
        parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
    return global_grad_norm(list(model.parameters())), torch.cat([g.flatten() for g in whole.values()]).norm().item()


@pytest.mark.parametrize(("world_size", "fsdp_size"), [(1, None), (2, None), (4, None), (4, 2)])
def test_global_grad_norm_is_that_of_the_whole_gradient_on_every_rank(run_ranks, world_size, fsdp_size):
    results = run_ranks(norm_of_sharded_gradients, world_size, fsdp_size)
    assert len({norm for norm, _ in results}) == 1
    for norm, expected in results:
        assert norm == pytest.approx(expected, rel=1e-6)


def model_with_gradient(*values):
    model = nn.Linear(len(values), 1, bias=False)
    nn.init.ones_(model.weight)
    model.weight.grad = torch.tensor([values])
    return model


@pytest.mark.parametrize(("max_grad_norm", "seen"), [(1.0, [0.6, 0.8]), (5.0, [3, 4]), (7.0, [3, 4]), (None, [3, 4])])
def test_gradients_above_the_limit_are_scaled_down_to_it(max_grad_norm, seen):
    """Gradient (3, 4) has norm 5. Adam's first moment after one step, over 1 - beta1, is the gradient it was given."""
    model = model_with_gradient(3.0, 4.0)
    optimizer = ShardedOptimizer(model, OptimizerConfig(max_grad_norm=max_grad_norm), total_steps=1)
    metrics = optimizer.step()
    moment = optimizer._adamw.state[model.weight]["exp_avg"] / (1 - 0.9)
    assert moment[0].tolist() == pytest.approx(seen, rel=1e-5)
    assert metrics["train/grad_norm"].result() == pytest.approx(5.0)
    assert model.weight.grad is None


def test_first_step_moves_by_the_learning_rate_of_its_schedule_and_decay():
    """AdamW by hand: w - lr * (weight_decay * w + sign(gradient)), as the moments' corrections cancel at first."""
    model = model_with_gradient(3.0, -4.0)
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, warmup_steps=1)
    metrics = ShardedOptimizer(model, config, total_steps=4).step()
    assert metrics["train/learning_rate"].result() == pytest.approx(0.05)
    assert model.weight[0].tolist() == pytest.approx([1 - 0.05 * 1.5, 1 + 0.05 * 0.5], abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_gradient_changes_nothing_but_the_counts(bad):
    model = model_with_gradient(1.0, 1.0)
    optimizer = ShardedOptimizer(model, OptimizerConfig(learning_rate=0.1, max_nonfinite_steps=2), total_steps=9)
    optimizer.step()
    weight, moment = model.weight.detach().clone(), optimizer._adamw.state[model.weight]["exp_avg"].clone()
    model.weight.grad = torch.tensor([[1.0, bad]])
    metrics = optimizer.step()
    assert torch.equal(model.weight, weight)
    assert torch.equal(optimizer._adamw.state[model.weight]["exp_avg"], moment)
    assert optimizer._adamw.state[model.weight]["step"].item() == 1
    assert optimizer.num_steps == 2
    assert metrics["train/nonfinite_fraction"].result() == 1.0
    assert (metrics["train/grad_norm"].total, metrics["train/grad_norm"].count) == (0.0, 0.0)
    assert model.weight.grad is None
    model.weight.grad = torch.tensor([[bad, 1.0]])
    with pytest.raises(TrainingError, match=r"in 2 optimizer steps in a row \(trainer\.max_nonfinite_steps=2\)"):
        optimizer.step()
    assert torch.equal(model.weight, weight)
