import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from shardwise.config import OptimizerConfig
from shardwise.engine import ParallelDims
from shardwise.engine.optim import adamw
from shardwise.engine.optim.optimizer import ShardedOptimizer


def layers(dtype=torch.float32):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Embedding(9, 4)).to(dtype)


def set_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if type(parameter.data) is torch.Tensor:
            parameter.grad = gradient
        else:
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)


def train(model, steps, **settings):
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1} | settings
    optimizer = ShardedOptimizer(model, OptimizerConfig(**settings), total_steps=steps, seed=3)
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step()
    return optimizer


def trained_on_mesh(fsdp_size, dtype, settings):
    """Eight steps on the ranks; the whole weights as float64."""
    mesh = (
        ParallelDims.from_sizes(world_size=dist.get_world_size(), fsdp_size=fsdp_size, ulysses_size=1).build("cpu").fsdp
    )
    model = layers(dtype)
    fully_shard(model, mesh=mesh)
    train(model, 8, **settings)
    return [parameter.full_tensor().detach().double() for parameter in model.parameters()]


@pytest.mark.parametrize("slice_elements", [1 << 24, 8])
def test_host_adamw_is_adamw(monkeypatch, slice_elements):
    monkeypatch.setattr(adamw, "SLICE_ELEMENTS", slice_elements)
    model, reference = layers(), layers()
    optimizer = train(model, 8, optimizer="adamw_cpu")
    train(reference, 8)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    (states,) = optimizer.optimizers
    moments = {(name, value.device.type) for state in states.state.values() for name, value in state.items()}
    assert moments == {("step", "cpu"), ("exp_avg", "cpu"), ("exp_avg_sq", "cpu")}
    assert {state["step"].item() for state in states.state.values()} == {8.0}
    assert list(optimizer.state_tensors()) == []


@pytest.mark.parametrize(("world_size", "fsdp_size"), [(2, None), (4, None), (4, 2)])
@pytest.mark.parametrize("settings", [{"optimizer": "adamw_cpu"}, {"adamw_implementation": "foreach"}])
def test_sharded_adamw_is_that_of_the_whole_model(run_ranks, world_size, fsdp_size, settings):
    reference = layers()
    train(reference, 8)
    for weights in run_ranks(trained_on_mesh, world_size, fsdp_size, torch.float32, settings):
        for ours, theirs in zip(weights, reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.double(), rtol=0, atol=1e-7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: copies between host and device")
def test_host_adamw_on_a_gpu_is_adamw(monkeypatch):
    monkeypatch.setattr(adamw, "SLICE_ELEMENTS", 8)
    model, reference = layers().cuda(), layers().cuda()
    for target, name in ((model, "adamw_cpu"), (reference, "adamw")):
        optimizer = ShardedOptimizer(target, OptimizerConfig(optimizer=name, learning_rate=1e-2), total_steps=8)
        for step in range(8):
            generator = torch.Generator().manual_seed(step)
            for parameter in target.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).cuda()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("slice_elements", [1 << 24, 8])
def test_bfloat16_update_is_adamws_rounded_to_a_neighbour(monkeypatch, implementation, slice_elements):
    """After one step from equal weights and gradients, before the next rounding can part them."""
    monkeypatch.setattr(adamw, "SLICE_ELEMENTS", slice_elements)
    model = layers(torch.bfloat16)
    reference = layers(torch.bfloat16).float()
    settings = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": None}
    config = OptimizerConfig(**settings, adamw_implementation=implementation)
    optimizer = ShardedOptimizer(model, config, total_steps=1)
    set_gradients(model, 0)
    for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
        whole.grad = parameter.grad.float()
    optimizer.step()
    ShardedOptimizer(reference, OptimizerConfig(**settings), total_steps=1).step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        down = (theirs.detach().view(torch.int32) & ~0xFFFF).view(torch.float32)
        up = (down.view(torch.int32) + 0x10000).view(torch.float32)
        assert ((ours.float() == down) | (ours.float() == up)).all()
    assert {tensor.dtype for tensor in optimizer.state_tensors()} == {torch.float32}


def test_bfloat16_weights_do_not_depend_on_the_layout(run_ranks):
    """The random bits belong to the element: one rank, shards and replicas round alike, bit for bit."""
    settings = {"max_grad_norm": None}  # a norm is summed in another order on other ranks
    expected, *_ = run_ranks(trained_on_mesh, 1, None, torch.bfloat16, settings)
    for world_size, fsdp_size in [(2, None), (4, None), (4, 2)]:
        for weights in run_ranks(trained_on_mesh, world_size, fsdp_size, torch.bfloat16, settings):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, expected, strict=True))


def test_bfloat16_weights_do_not_depend_on_how_parameters_are_grouped():
    """Nor, so, on which of them are experts on a mesh of their own."""
    together, apart = layers(torch.bfloat16), layers(torch.bfloat16)
    groups = [
        len(train(model, 4, max_grad_norm=None, module_learning_rates=rates).optimizers[0].param_groups)
        for model, rates in ((together, {}), (apart, {"0": 1e-2}))
    ]
    assert groups[0] < groups[1]
    for ours, theirs in zip(together.parameters(), apart.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_seed_decides_the_rounding():
    trained = []
    for seed in (0, 0, 1):
        model = layers(torch.bfloat16)
        optimizer = ShardedOptimizer(model, OptimizerConfig(learning_rate=1e-3), total_steps=1, seed=seed)
        set_gradients(model, 0)
        optimizer.step()
        trained.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    assert torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])


NUM_WEIGHTS, NUM_UPDATES, RATE = 100_000, 10, 1e-6


def moved_by_small_updates(dtype):
    """Weights of standard deviation 0.02 after ten steps at 1e-6 along a constant gradient of both signs.

    Returns:
        the share of weights that changed, and the mean movement against the gradient's sign, in float64.
    """
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(NUM_WEIGHTS // 100, 100, bias=False)
    model.weight.data = (torch.randn(100, NUM_WEIGHTS // 100, generator=generator) * 0.02).to(dtype)
    start, sign = model.weight.detach().clone(), torch.ones_like(model.weight)
    sign[:, ::2] = -1
    optimizer = ShardedOptimizer(model, OptimizerConfig(learning_rate=RATE), total_steps=NUM_UPDATES, seed=1)
    for _ in range(NUM_UPDATES):
        model.weight.grad = sign.clone()
        optimizer.step()
    movement = (start.double() - model.weight.detach().double()) * sign
    return (movement != 0).double().mean().item(), movement


def test_trap_03_bf16_masters_lose_small_updates_unless_rounded_stochastically():
    """Trap 3: at a learning rate of 1e-6 Adam moves each weight by 1e-6 a step, far below half the distance of bfloat16
    numbers near 0.02 (6e-5). Rounded to nearest, 2 % of the weights change; float32 masters change all of them, and
    stochastic rounding keeps the mean movement."""
    expected = NUM_UPDATES * RATE
    share, movement = moved_by_small_updates(torch.float32)
    assert share > 0.999
    assert movement.mean().item() == pytest.approx(expected, rel=1e-3)

    nearest = torch.randn(NUM_WEIGHTS, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    start = nearest.clone()
    for _ in range(NUM_UPDATES):
        nearest = (nearest.float() - RATE).bfloat16()
    assert (nearest != start).double().mean().item() == pytest.approx(0.02, abs=0.005)

    share, movement = moved_by_small_updates(torch.bfloat16)
    standard_error = movement.std().item() / math.sqrt(NUM_WEIGHTS)
    assert standard_error < 0.01 * expected
    assert movement.mean().item() == pytest.approx(expected, abs=4 * standard_error)
    for columns in (movement[:, ::2], movement[:, 1::2]):  # both signs of the gradient
        assert columns.mean().item() == pytest.approx(expected, abs=6 * standard_error)
    assert share == pytest.approx(0.22, abs=0.02)  # each update that is rounded away from its start moves far
