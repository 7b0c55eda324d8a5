import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from shardwise.config import ConfigError, OptimizerConfig, TrainingError
from shardwise.engine import ParallelDims
from shardwise.engine.optim.optimizer import ShardedOptimizer, global_grad_norm


def norm_of_sharded_gradients(fsdp_size):
    """Gradients whose dim 0 is 1, 3 and 7 rows: on four ranks some shards are empty."""
    size = dist.get_world_size()
    mesh = ParallelDims.from_sizes(world_size=size, fsdp_size=fsdp_size, ulysses_size=1).build("cpu").fsdp
    model = nn.ParameterDict({str(rows): nn.Parameter(torch.zeros(rows, 2)) for rows in (1, 3, 7)})
    fully_shard(model, mesh=mesh)
    torch.manual_seed(3)
    whole = {rows: torch.randn(rows, 2) for rows in (1, 3, 7)}
    for rows, gradient in whole.items():
        parameter = model[str(rows)]
        parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
    losses = [torch.tensor(2.5), torch.tensor(math.inf if dist.get_rank() == size - 1 else -1.0)]
    with_losses = [global_grad_norm(list(model.parameters()), some) for some in (losses[:1], losses)]
    whole_norm = torch.cat([g.flatten() for g in whole.values()]).norm().item()
    return global_grad_norm(list(model.parameters())), whole_norm, with_losses


@pytest.mark.parametrize(("world_size", "fsdp_size"), [(1, None), (2, None), (4, None), (4, 2)])
def test_global_grad_norm_is_that_of_the_whole_gradient_on_every_rank(run_ranks, world_size, fsdp_size):
    results = run_ranks(norm_of_sharded_gradients, world_size, fsdp_size)
    assert len({norm for norm, *_ in results}) == 1
    for norm, expected, (with_finite_losses, with_a_bad_one) in results:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert with_finite_losses == norm
        assert math.isnan(with_a_bad_one), "the last rank's loss, on every rank: also on replicas of other ranks"


def test_the_norm_of_a_large_gradient_on_a_cpu_is_right():
    """Torch adds squares up in a few sums of float32, which stop growing."""
    weight = nn.Parameter(torch.zeros(1 << 24))
    generator = torch.Generator().manual_seed(0)
    weight.grad = torch.randn(weight.shape, generator=generator)
    exact = float(weight.grad.double().square().sum().sqrt())
    assert global_grad_norm([weight]) == pytest.approx(exact, rel=1e-6)


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
    assert "train/grad_norm" not in metrics
    assert model.weight.grad is None
    model.weight.grad = torch.tensor([[bad, 1.0]])
    with pytest.raises(TrainingError, match=r"in 2 optimizer steps in a row \(trainer\.max_nonfinite_steps=2\)"):
        optimizer.step()
    assert torch.equal(model.weight, weight)


def test_a_step_that_is_skipped_counts_for_the_schedule_and_changes_nothing_else():
    """Without a gradient momentum and decay would move the weights."""
    model = model_with_gradient(3.0, 4.0)
    optimizer = ShardedOptimizer(
        model, OptimizerConfig(learning_rate=0.1, lr_schedule="linear", weight_decay=0.1), total_steps=4
    )
    optimizer.step()
    before = {name: tensor.clone() for name, tensor in optimizer.named_tensors().items()}
    rates = [optimizer.skip_step()["train/learning_rate"].result() for _ in range(2)]
    assert optimizer.num_steps == 3
    assert rates == pytest.approx([0.1 * 2 / 3, 0.1 / 3])
    for name, tensor in optimizer.named_tensors().items():
        assert torch.equal(tensor, before[name]), name


def test_gradients_may_be_missing_in_part_or_altogether():
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = ShardedOptimizer(model, OptimizerConfig(learning_rate=0.1), total_steps=2)
    metrics = optimizer.step()
    assert metrics["train/grad_norm"].result() == 0.0
    assert list(optimizer.state_tensors()) == []
    model[1].weight.grad = torch.tensor([[3.0, 4.0]])
    metrics = optimizer.step()
    assert metrics["train/grad_norm"].result() == pytest.approx(5.0)
    assert torch.equal(model[0].weight, before[0])
    assert (before[1] - model[1].weight)[0].tolist() == pytest.approx([0.1, 0.1], rel=1e-4)


def norm_over_two_meshes():
    """Parameters on the whole mesh, on each half of it, replicated and plain: each counts its elements once."""
    size = dist.get_world_size()
    meshes = [
        ParallelDims.from_sizes(world_size=size, fsdp_size=fsdp_size, ulysses_size=1).build("cpu").fsdp
        for fsdp_size in (None, 2)
    ]
    torch.manual_seed(3)
    parameters, squares = [], 0.0
    for rows in (1, 3, 7):
        for mesh in meshes:
            whole = torch.randn(rows, 2)
            module = nn.ParameterList([nn.Parameter(torch.zeros(rows, 2))])
            fully_shard(module, mesh=mesh)
            module[0].grad = distribute_tensor(whole, mesh, module[0].placements)
            parameters.append(module[0])
            squares += whole.square().sum().item()
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.ones(3)
    without = nn.Parameter(torch.zeros(3))
    return global_grad_norm([*parameters, plain, without]), math.sqrt(squares + 3)


def test_norm_over_parameters_on_several_meshes(run_ranks):
    results = run_ranks(norm_over_two_meshes, 4)
    assert len({norm for norm, _ in results}) == 1
    for norm, expected in results:
        assert norm == pytest.approx(expected, rel=1e-6)


def test_learning_rates_of_modules_follow_the_schedule_and_are_reported():
    """Adam's first step is the learning rate times the gradient's sign; at the middle of warm-up rates are halved."""
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    config = OptimizerConfig(learning_rate=0.2, module_learning_rates={"b": 0.6}, warmup_steps=1)
    before = [parameter.item() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones(1, 1)
    metrics = ShardedOptimizer(model, config, total_steps=4).step()
    moved = [old - parameter.item() for old, parameter in zip(before, model.parameters(), strict=True)]
    assert moved == pytest.approx([0.1, 0.3], rel=1e-4)
    rates = {name: value.result() for name, value in metrics.items() if "learning_rate" in name}
    assert rates == pytest.approx({"train/learning_rate": 0.1, "train/learning_rate/b": 0.3})


def test_one_learning_rate_is_reported_once():
    metrics = ShardedOptimizer(model_with_gradient(1.0), OptimizerConfig(), total_steps=1).step()
    assert sorted(metrics) == [
        "train/grad_norm",
        "train/learning_rate",
        "train/nonfinite_fraction",
        "train/nonfinite_loss_fraction",
    ]


@pytest.mark.parametrize(("max_grad_norm", "seen"), [(1.0, [0.6, 0.8]), (7.0, [3, 4]), (None, [3, 4])])
def test_scaled_gradients_are_unscaled_before_they_are_measured_and_clipped(max_grad_norm, seen):
    model = model_with_gradient(3.0, 4.0)
    config = OptimizerConfig(max_grad_norm=max_grad_norm)
    optimizer = ShardedOptimizer(model, config, total_steps=1, loss_scaling=True)
    assert optimizer.loss_scale == 65536.0
    model.weight.grad *= optimizer.loss_scale
    metrics = optimizer.step()
    moment = optimizer._adamw.state[model.weight]["exp_avg"] / (1 - 0.9)
    assert moment[0].tolist() == pytest.approx(seen, rel=1e-5)
    assert metrics["train/grad_norm"].result() == pytest.approx(5.0)
    assert metrics["train/loss_scale"].result() == 65536.0


def test_overflows_halve_the_scale_and_end_the_run_only_at_its_minimum():
    model = model_with_gradient(1.0)
    optimizer = ShardedOptimizer(model, OptimizerConfig(max_nonfinite_steps=2), total_steps=99, loss_scaling=True)
    faults = []

    def on_fault(norm):
        faults.append((norm, optimizer.num_steps, optimizer.loss_scale, model.weight.grad))

    for remaining in range(16, 0, -1):
        assert optimizer.loss_scale == 2.0**remaining
        model.weight.grad = torch.tensor([[math.inf]])
        metrics = optimizer.step(on_fault=on_fault)
        assert metrics["train/nonfinite_fraction"].result() == 1.0
        assert metrics["train/loss_scale"].result() == 2.0**remaining
    assert optimizer.loss_scale == 1.0
    assert faults == [], "a smaller scale may cure an overflow"
    model.weight.grad = torch.tensor([[math.inf]])
    optimizer.step(on_fault=on_fault)
    assert faults == [(math.inf, 16, 1.0, None)]
    model.weight.grad = torch.tensor([[math.nan]])
    with pytest.raises(TrainingError, match=r"nan in 2 optimizer steps in a row \(trainer\.max_nonfinite_steps=2\)"):
        optimizer.step(on_fault=on_fault)
    assert len(faults) == 1, "the first of a row"
    assert model.weight.item() == 1.0


def scale_after_a_bad_loss_on_one_rank():
    model = nn.Linear(2, 2, bias=False)
    fully_shard(model)
    optimizer = ShardedOptimizer(model, OptimizerConfig(max_nonfinite_steps=2), total_steps=2, loss_scaling=True)
    faults = []

    def step(loss_of_rank_1):
        model.weight.grad = torch.zeros_like(model.weight)
        return optimizer.step([torch.tensor(loss_of_rank_1 if dist.get_rank() else 1.0)], on_fault=faults.append)

    assert step(math.nan)["train/nonfinite_fraction"].result() == 1.0
    with pytest.raises(TrainingError, match="in 2 optimizer steps in a row"):
        step(math.inf)
    return optimizer.loss_scale, len(faults)


def test_a_loss_that_is_not_finite_is_no_overflow_that_a_smaller_scale_cures(run_ranks):
    assert run_ranks(scale_after_a_bad_loss_on_one_rank, 2) == [(2.0**16, 1)] * 2


def scale_after_an_overflow_on_one_rank():
    model = nn.Linear(2, 2, bias=False)
    fully_shard(model)
    optimizer = ShardedOptimizer(model, OptimizerConfig(), total_steps=2, loss_scaling=True)
    before = model.weight.full_tensor()
    whole = torch.tensor([[1.0, 1.0], [math.inf, 1.0]])  # the second row is rank 1's
    model.weight.grad = distribute_tensor(whole, model.weight.device_mesh, model.weight.placements)
    optimizer.step()
    return optimizer.loss_scale, torch.equal(before, model.weight.full_tensor())


def test_overflow_on_one_rank_is_an_overflow_on_all(run_ranks):
    assert run_ranks(scale_after_an_overflow_on_one_rank, 2) == [(2.0**15, True)] * 2


@pytest.mark.parametrize("optimizer", ["adamw_cpu", "adamw_8bit", "muon"])
def test_bfloat16_weights_with_other_optimizers_than_adamw_are_refused(optimizer):
    with pytest.raises(ConfigError) as error:
        ShardedOptimizer(nn.Linear(2, 2).bfloat16(), OptimizerConfig(optimizer=optimizer), total_steps=1)
    assert str(error.value) == (
        f"trainer.optimizer={optimizer} with weights in torch.bfloat16: it supports torch.float32; set "
        "engine.master_dtype=float32 or trainer.optimizer=adamw"
    )


def test_weights_of_other_or_several_dtypes_are_refused():
    with pytest.raises(ConfigError, match=r"weights in torch\.float16: it supports torch\.float32 and torch\.bfloat16"):
        ShardedOptimizer(nn.Linear(2, 2).half(), OptimizerConfig(), total_steps=1)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False).bfloat16())
    with pytest.raises(ConfigError, match=r"2 dtypes \(0\.weight is torch\.float32, 1\.weight is torch\.bfloat16\)"):
        ShardedOptimizer(model, OptimizerConfig(), total_steps=1)


@pytest.mark.parametrize("settings", [{}, {"adamw_implementation": "foreach"}, {"optimizer": "muon"}])
def test_state_tensors_can_be_moved_away_and_back(settings):
    """States whose `.data` was replaced and put back continue as if nothing had been."""
    model, undisturbed = nn.Linear(3, 2), nn.Linear(3, 2)
    undisturbed.load_state_dict(model.state_dict())
    optimizers = [ShardedOptimizer(m, OptimizerConfig(**settings), total_steps=2) for m in (model, undisturbed)]
    for _ in range(2):
        states = list(optimizers[0].state_tensors())
        for tensor in states:
            away, tensor.data = tensor.data.clone(), torch.empty(0)
            tensor.data = away
        for m, optimizer in zip((model, undisturbed), optimizers, strict=True):
            m.weight.grad, m.bias.grad = torch.ones(2, 3), torch.ones(2)
            optimizer.step()
    assert sum(tensor.numel() for tensor in states) == (6 + 4 if settings.get("optimizer") == "muon" else 12 + 4)
    assert torch.equal(model.weight, undisturbed.weight)


def bytes_left_after_offload():
    """Two ranks: what sharded states hold once each tensor's data is replaced by nothing."""
    model = nn.Linear(4, 4)
    fully_shard(model)
    optimizer = ShardedOptimizer(model, OptimizerConfig(), total_steps=1)
    for parameter in model.parameters():
        ones = torch.ones(parameter.shape)
        parameter.grad = distribute_tensor(ones, parameter.device_mesh, parameter.placements)
    optimizer.step()
    shards = [s.to_local() for state in optimizer._adamw.state.values() for k, s in state.items() if k != "step"]
    before = sum(shard.numel() for shard in shards)
    for tensor in optimizer.state_tensors():
        tensor.data = torch.empty(0)
    states = [s for state in optimizer._adamw.state.values() for k, s in state.items() if k != "step"]
    return before, sum(state.to_local().numel() for state in states)


def test_state_tensors_are_the_memory_of_sharded_states(run_ranks):
    assert run_ranks(bytes_left_after_offload, 2) == [(2 * (8 + 2), 0)] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"muon_momentum": 0.9},
            "muon_momentum=0.9 has no effect with optimizer=adamw; remove it or set optimizer=muon",
        ),
        ({"muon_num_iterations": 6, "optimizer": "adamw_cpu"}, "muon_num_iterations=6 has no effect with optimizer="),
        ({"muon_adjust_lr": "original", "optimizer": "adamw_8bit"}, "muon_adjust_lr=original has no effect with"),
        (
            {"adamw_implementation": "foreach", "optimizer": "adamw_cpu"},
            "adamw_implementation=foreach has no effect with optimizer=adamw_cpu, which has one kernel; remove it or "
            "set optimizer=adamw",
        ),
        (
            {"adamw_implementation": "foreach", "optimizer": "adamw_8bit"},
            "foreach has no effect with optimizer=adamw_8",
        ),
        ({"muon_num_iterations": 100, "optimizer": "muon"}, "muon_num_iterations=100: input should be less than or"),
    ],
)
def test_keys_of_other_optimizers_are_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        OptimizerConfig.parse(settings, origin="test")
    assert message in str(error.value)


def test_muon_reads_the_implementation_of_its_adamw():
    config = OptimizerConfig(
        optimizer="muon", adamw_implementation="foreach", muon_momentum=0.9, muon_num_iterations=99
    )
    optimizer = ShardedOptimizer(nn.Linear(2, 2), config, total_steps=1)
    assert [type(one).__name__ for one in optimizer.optimizers] == ["ShardedMuon", "AdamW"]
    assert optimizer._adamw.param_groups[0]["foreach"] is True
