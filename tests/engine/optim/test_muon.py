import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers.pytorch_utils import Conv1D

from shardwise.config import ConfigError, OptimizerConfig
from shardwise.engine import ParallelDims
from shardwise.engine.optim.optimizer import ShardedOptimizer
from shardwise.engine.shards import local_shard

SHAPES = [(7, 5), (5, 9), (1, 6), (3, 4), (16, 6), (6, 16), (8, 8), (2, 3), (12, 2)]
"""Rows that no number of ranks divides, and fewer rows than ranks."""
LEARNING_RATE, WEIGHT_DECAY = 0.02, 0.1
NUM_STEPS = 5
BOUND = 1e-7
"""Measured: 3e-8 on weights up to 2.4, roundings of weight + step (torch may fuse its product and sum). Orthogonalising
the shards instead of the matrices differs by 0.1 and more, as the test of that name shows."""


def small_model():
    torch.manual_seed(11)
    layers = nn.ModuleList([nn.Linear(columns, rows, bias=rows == 7) for rows, columns in SHAPES])
    return nn.ModuleDict({"embed": nn.Embedding(10, 4), "layers": layers, "lm_head": nn.Linear(4, 10, bias=False)})


def set_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if parameter.requires_grad:
            is_sharded = type(parameter.data) is not torch.Tensor
            layout = (parameter.device_mesh, parameter.placements) if is_sharded else None
            parameter.grad = distribute_tensor(gradient, *layout) if layout else gradient


def config_for(adjust_lr, **settings):
    return OptimizerConfig(
        optimizer="muon",
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=None,
        muon_adjust_lr=adjust_lr,
        **settings,
    )


def weights_by_torch(adjust_lr, momentum=0.95):
    """torch.optim.Muon and AdamW on the whole model."""
    model = small_model()
    matrices = [layer.weight for layer in model["layers"]]
    rest = [model["layers"][0].bias, model["embed"].weight]
    muon = torch.optim.Muon(
        matrices, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, momentum=momentum, adjust_lr_fn=adjust_lr
    )
    groups = [
        {"params": rest, "weight_decay": 0.0},
        {"params": [model["lm_head"].weight], "weight_decay": WEIGHT_DECAY},
    ]
    adamw = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
    for step in range(NUM_STEPS):
        set_gradients(model, step)
        muon.step()
        adamw.step()
    return [parameter.detach() for parameter in model.parameters()]


def weights_by_ours(fsdp_size, adjust_lr, settings):
    model = small_model()
    if fsdp_size != "plain":
        size = dist.get_world_size()
        mesh = ParallelDims.from_sizes(world_size=size, fsdp_size=fsdp_size, ulysses_size=1).build("cpu").fsdp
        for layer in model["layers"]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model["embed"], mesh=mesh)
        fully_shard(model["lm_head"], mesh=mesh)
    optimizer = ShardedOptimizer(model, config_for(adjust_lr, **settings), total_steps=NUM_STEPS)
    for step in range(NUM_STEPS):
        set_gradients(model, step)
        optimizer.step()
    full = [p.full_tensor() if fsdp_size != "plain" else p for p in model.parameters()]
    return [tensor.detach() for tensor in full], sum(tensor.numel() for tensor in optimizer.state_tensors())


@pytest.mark.parametrize(
    ("world_size", "fsdp_size", "adjust_lr"),
    [
        (1, "plain", "match_rms_adamw"),
        (1, None, "original"),
        (2, None, "match_rms_adamw"),
        (4, None, "original"),
        (4, None, "match_rms_adamw"),
        (4, 2, "match_rms_adamw"),
    ],
)
def test_sharded_muon_is_torchs_on_the_whole_model(run_ranks, world_size, fsdp_size, adjust_lr):
    expected = weights_by_torch(adjust_lr)
    results = run_ranks(weights_by_ours, world_size, fsdp_size, adjust_lr, {})
    for weights, _ in results:
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=BOUND)
        assert all(torch.equal(ours, first) for ours, first in zip(weights, results[0][0], strict=True))


def test_states_are_sharded_and_muon_has_one_of_them(run_ranks):
    """Momentum is one float for each element of a matrix, AdamW's moments are two for the rest; no rank has more."""
    num_matrix = sum(rows * columns for rows, columns in SHAPES)
    num_rest = 40 + 40 + 7
    (_, alone), *_ = run_ranks(weights_by_ours, 1, None, "original", {})
    assert alone == num_matrix + 2 * num_rest
    sharded = [count for _, count in run_ranks(weights_by_ours, 4, None, "original", {})]
    assert sum(sharded) == alone
    assert max(sharded) < 0.4 * alone


def test_momentum_and_iterations_reach_the_update():
    expected = weights_by_torch("original", momentum=0.5)
    weights, _ = weights_by_ours("plain", "original", {"muon_momentum": 0.5})
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=BOUND)
    weights, _ = weights_by_ours("plain", "original", {"muon_momentum": 0.5, "muon_num_iterations": 1})
    assert max((ours - theirs).abs().max() for ours, theirs in zip(weights, expected, strict=True)) > 1e-2


def test_orthogonalising_shards_would_be_far_outside_the_bound():
    """What a Muon that does not gather would compute on two ranks."""
    whole, gradients = torch.zeros(8, 8), torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    parts = [whole.clone(), whole[:4].clone(), whole[4:].clone()]
    for part, gradient in zip(parts, [gradients, gradients[:4], gradients[4:]], strict=True):
        parameter = nn.Parameter(part)
        parameter.grad = gradient.clone()
        torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0).step()
        part.copy_(parameter.detach())
    assert (torch.cat(parts[1:]) - parts[0]).abs().max() > 0.1


def weights_of_transposed(fsdp_size):
    """A layer of 6 columns in and 16 rows out, as GPT-2 stores it and as others do, after equal gradients."""
    layers = nn.ModuleList([Conv1D(16, 6), nn.Linear(6, 16)])
    with torch.no_grad():
        torch.manual_seed(3)
        layers[1].weight.copy_(layers[0].weight.T)
    if fsdp_size != "plain":
        mesh = (
            ParallelDims.from_sizes(world_size=dist.get_world_size(), fsdp_size=None, ulysses_size=1).build("cpu").fsdp
        )
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    optimizer = ShardedOptimizer(layers, config_for("original"), total_steps=1)
    gradient = torch.randn(6, 16, generator=torch.Generator().manual_seed(5))
    for layer, of_layer in zip(layers, (gradient, gradient.T.contiguous()), strict=True):
        if fsdp_size != "plain":
            of_layer = distribute_tensor(of_layer, layer.weight.device_mesh, layer.weight.placements)
        layer.weight.grad = of_layer
    optimizer.step()
    return [layer.weight.detach() if fsdp_size == "plain" else layer.weight.full_tensor().detach() for layer in layers]


@pytest.mark.parametrize(("world_size", "fsdp_size"), [(1, "plain"), (2, None)])
def test_the_step_of_a_matrix_does_not_depend_on_its_orientation(run_ranks, world_size, fsdp_size):
    """The learning rate of `original` depends on rows / columns, and Newton-Schulz rounds to bfloat16."""
    for of_conv, of_linear in run_ranks(weights_of_transposed, world_size, fsdp_size):
        torch.testing.assert_close(of_conv.T, of_linear, rtol=0, atol=BOUND)


def frozen_and_missing_gradients():
    """Two ranks; the first layer is frozen, the second has no gradient in the first step."""
    model = small_model()
    model["layers"][0].requires_grad_(False)
    for layer in model["layers"]:
        fully_shard(layer)
    before = [local_shard(layer.weight.detach()).clone() for layer in model["layers"]]
    optimizer = ShardedOptimizer(model, config_for("original"), total_steps=2)
    set_gradients(model, 0)
    model["layers"][1].weight.grad = None
    optimizer.step()
    after = [local_shard(layer.weight.detach()) for layer in model["layers"]]
    return [torch.equal(old, new) for old, new in zip(before, after, strict=True) if old.numel()][:2]


def test_matrices_without_a_gradient_stay(run_ranks):
    assert run_ranks(frozen_and_missing_gradients, 2) == [[True, True]] * 2


def test_muon_without_a_matrix_is_refused():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "norm": nn.LayerNorm(2)})
    with pytest.raises(ConfigError, match=r"^trainer\.optimizer=muon finds no matrix among the trained weights"):
        ShardedOptimizer(model, config_for("original"), total_steps=1)


def test_learning_rate_of_zero_keeps_the_matrices():
    model = small_model()
    config = config_for("original", module_learning_rates={"layers.2": 0.0})
    before = [layer.weight.detach().clone() for layer in model["layers"]]
    set_gradients(model, 0)
    ShardedOptimizer(model, config, total_steps=1).step()
    moved = [not torch.equal(old, layer.weight) for old, layer in zip(before, model["layers"], strict=True)]
    assert moved == [index != 2 for index in range(len(SHAPES))]
