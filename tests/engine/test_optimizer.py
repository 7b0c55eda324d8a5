import math

import pytest
import torch
import torch.distributed as dist
from tiny_models import tiny_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from shardwise.config import OptimizerConfig, TrainingError
from shardwise.engine import ParallelDims
from shardwise.engine.optimizer import ShardedOptimizer, global_grad_norm, learning_rate_at, parameter_groups

COSINE = [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0]
"""(1 + cos(pi k / 4)) / 2 for k = 0..4."""


@pytest.mark.parametrize(
    ("settings", "total_steps", "expected"),
    [
        ({}, 3, [1, 1, 1]),
        ({"warmup_steps": 3}, 6, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"lr_schedule": "linear"}, 5, [1, 0.75, 0.5, 0.25, 0]),
        ({"lr_schedule": "linear", "min_lr_ratio": 0.2}, 5, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"lr_schedule": "linear", "warmup_steps": 1}, 6, [0.5, 1, 0.75, 0.5, 0.25, 0]),
        ({"lr_schedule": "cosine"}, 5, COSINE),
        ({"lr_schedule": "cosine", "warmup_steps": 2}, 7, [1 / 3, 2 / 3, *COSINE]),
        ({"lr_schedule": "cosine", "min_lr_ratio": 0.5}, 5, [0.5 + x / 2 for x in COSINE]),
        ({"lr_schedule": "wsd", "lr_decay_steps": 2}, 6, [1, 1, 1, 1, 0.5, 0]),
        (
            {"lr_schedule": "wsd", "lr_decay_steps": 4, "warmup_steps": 1, "min_lr_ratio": 0.2},
            8,
            [0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.2],
        ),
        ({"lr_schedule": "linear"}, 1, [1]),
        ({"lr_schedule": "cosine", "warmup_steps": 2}, 3, [1 / 3, 2 / 3, 1]),
    ],
)
def test_learning_rates_worked_by_hand(settings, total_steps, expected):
    config = OptimizerConfig(learning_rate=4e-3, **settings)
    rates = [learning_rate_at(config, step, total_steps) for step in range(total_steps)]
    assert rates == pytest.approx([4e-3 * share for share in expected], abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_learning_rate_stays_at_its_floor_after_the_last_step(schedule):
    config = OptimizerConfig(
        learning_rate=1.0, lr_schedule=schedule, min_lr_ratio=0.1, lr_decay_steps=2 if schedule == "wsd" else 0
    )
    assert learning_rate_at(config, 25, 10) == pytest.approx(0.1)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_only_matrices_outside_the_embedding_are_decayed(family):
    """A tied output projection is the embedding and is not decayed; an untied one is a matrix like others."""
    model = tiny_model(family)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, kept = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    decayed, kept = ([names[id(parameter)] for parameter in group["params"]] for group in (decayed, kept))
    assert sorted(decayed + kept) == sorted(names.values())
    assert {name.split(".")[-2] for name in kept} >= {"embed_tokens", "norm", "input_layernorm"}
    assert all("norm" in name or "embed_tokens" in name for name in kept)
    assert ("lm_head.weight" in decayed) == (family == "llama")


def test_frozen_parameters_are_in_no_group():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    decayed, kept = parameter_groups(model, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(model[1].weight)]
    assert [id(p) for p in kept["params"]] == [id(model[1].bias)]


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
