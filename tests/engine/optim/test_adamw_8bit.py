import importlib
import importlib.util
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from ranks import RankError
from resumed_engines import AFTER, BEFORE, assert_same, resumed, uninterrupted
from sharded_lora import wholes
from tiny_models import tiny_folder
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from shardwise.config import ConfigError, OptimizerConfig
from shardwise.engine import ParallelDims
from shardwise.engine.files.checkpoint import load_state, save_state
from shardwise.engine.optim import adamw_8bit
from shardwise.engine.optim.optimizer import ShardedOptimizer

PACKAGES = [
    pytest.param(
        "torchao",
        marks=[
            pytest.mark.full,
            pytest.mark.skipif(
                importlib.util.find_spec("torchao") is None or shutil.which("g++") is None,
                reason="needs torchao, and a C++ compiler for its compiled kernel",
            ),
        ],
    ),
    pytest.param(
        "bitsandbytes",
        marks=pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
    ),
]


def only(package):
    """A context in which the other package cannot be imported."""
    name = f"{package}.optim"
    return patch.object(adamw_8bit, "_import", lambda asked: importlib.import_module(name) if asked == name else None)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(adamw_8bit, "_import", lambda name: None)
    with pytest.raises(ConfigError) as error:
        ShardedOptimizer(nn.Linear(64, 64), OptimizerConfig(optimizer="adamw_8bit"), total_steps=1)
    assert str(error.value) == (
        "trainer.optimizer=adamw_8bit needs torchao or bitsandbytes, and can import neither; pip install torchao, or "
        "set trainer.optimizer to adamw or adamw_cpu"
    )


def test_a_model_without_a_matrix_to_quantise_is_refused():
    with pytest.raises(ConfigError) as error:
        ShardedOptimizer(nn.Linear(64, 63), OptimizerConfig(optimizer="adamw_8bit"), total_steps=1)
    assert str(error.value) == (
        "trainer.optimizer=adamw_8bit finds no matrix to quantise among the trained weights (each rank's part has to "
        "be whole blocks of 256 elements, 4096 at least); set trainer.optimizer=adamw"
    )


SHAPES = {
    (256, 96): True,
    (252, 128): False,  # 63 rows end in the middle of a block
    (128, 64): False,  # 2,048 elements a rank
    (129, 256): True,
    (4, 32, 33): False,
    (4, 64, 64): True,
    (1 << 16,): False,
}


def whole_blocks(shapes):
    model = nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in shapes])
    fully_shard(model)
    return [adamw_8bit.has_whole_blocks(parameter) for parameter in model]


def test_a_matrix_is_quantised_where_no_block_is_shared_by_ranks(run_ranks):
    assert run_ranks(whole_blocks, 4, list(SHAPES)) == [list(SHAPES.values())] * 4


class PlainSGD(torch.optim.SGD):
    """Refuses DTensors and tensors without elements, as the kernels of bitsandbytes do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                assert type(parameter.data) is torch.Tensor
                assert parameter.grad is None or parameter.numel() > 0
        return super().step(closure)


def moved_through_aliases():
    """The weights after a step, and after one that follows a move to new memory."""
    mesh = ParallelDims.from_sizes(world_size=2, fsdp_size=None, ulysses_size=1).build("cpu").fsdp
    model = nn.ParameterList([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2, 2))])
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
SETTINGS = {"learning_rate": 1e-3, "weight_decay": 0.1, "lr_schedule": "linear", "max_grad_norm": None}
SIZES = [(96, 256), (256, 128), (128, 1)]
"""The last weight has one row: its moments are float32, as those of the biases are."""


def linear_layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*size) for size in SIZES))


def take_gradients(model, reference, step):
    """Of the reference, whatever the model's layout."""
    inputs = torch.randn(32, SIZES[0][0], generator=torch.Generator().manual_seed(step))
    reference(inputs).sub(1).square().mean().backward()
    for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
        parameter.grad = distribute_tensor(whole.grad.clone(), parameter.device_mesh, parameter.placements)


def gap_to_float32(package):
    """Trains on the ranks in 8 bits what AdamW trains whole, from the same gradients.

    Returns:
        the L2 distance of the two movements over the length of the exact one, and the bytes of this rank's states in 8
        bits and of all states in float32.
    """
    model, reference = linear_layers(), linear_layers()
    start = [parameter.detach().clone() for parameter in reference.parameters()]
    fully_shard(model)
    with only(package):
        ours = ShardedOptimizer(model, OptimizerConfig(optimizer="adamw_8bit", **SETTINGS), total_steps=NUM_STEPS)
    theirs = ShardedOptimizer(reference, OptimizerConfig(**SETTINGS), total_steps=NUM_STEPS)
    for step in range(NUM_STEPS):
        take_gradients(model, reference, step)
        ours.step()
        theirs.step()
    ends = zip(model.parameters(), reference.parameters(), start, strict=True)
    movements = [(p.full_tensor().detach() - first, q.detach() - first) for p, q, first in ends]
    in_8bit, exact = (torch.cat([pair[side].flatten() for pair in movements]).double() for side in (0, 1))
    gap = ((in_8bit - exact).norm() / exact.norm()).item()
    return gap, *(sum(tensor.nbytes for tensor in optimizer.state_tensors()) for optimizer in (ours, theirs))


@pytest.mark.parametrize("package", PACKAGES)
def test_it_follows_float32_in_about_a_quarter_of_the_memory_on_any_number_of_ranks(run_ranks, package):
    gaps = set()
    for world_size in (1, 2):
        results = run_ranks(gap_to_float32, world_size, package, timeout_seconds=300)
        for gap, num_bytes, num_float32_bytes in results:
            gaps.add(gap)
            assert 0 < gap < 0.03
            assert num_bytes * world_size < 0.29 * num_float32_bytes
    assert len(gaps) == 1, "blocks are those of whole weights"


def trained(package, fsdp_size, steps, *, load=None, save=None):
    """Goes on from a state, or from the beginning, and saves one; the state before and after the steps, whole."""
    dims = ParallelDims.from_sizes(world_size=torch.distributed.get_world_size(), fsdp_size=fsdp_size, ulysses_size=1)
    model, reference = linear_layers(), linear_layers()
    fully_shard(model, mesh=dims.build("cpu").fsdp)
    with only(package):
        optimizer = ShardedOptimizer(model, OptimizerConfig(optimizer="adamw_8bit", **SETTINGS), total_steps=NUM_STEPS)
    if load is not None:
        load_state(optimizer, Path(load))
    states = [whole_state(optimizer)]
    for step in steps:
        reference.zero_grad()
        take_gradients(model, reference, step)
        optimizer.step()
    states.append(whole_state(optimizer))
    if save is not None:
        save_state(optimizer, Path(save))
    return states


def whole_state(optimizer):
    return wholes(optimizer.named_tensors()), optimizer.numbers()


KEYS = {
    "torchao": {"exp_avg_codes", "exp_avg_scale", "exp_avg_sq_codes", "exp_avg_sq_scale", "step"},
    "bitsandbytes": {"state1", "state2", "absmax1", "absmax2"},
}
LAYOUTS = {"2 to 2": ((2, None), (2, None)), "1 to 4": ((1, None), (4, None)), "2x2 to 1": ((4, 2), (1, None))}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_training_goes_on_bitwise_on_every_layout_that_keeps_blocks_whole(run_ranks, tmp_path, package, layouts):
    (size, fsdp_size), (other_size, other_fsdp_size) = LAYOUTS[layouts]
    state = str(tmp_path / "state")
    save, load = {"save": state}, {"load": state}
    run = partial(run_ranks, timeout_seconds=300)
    _, saved = run(partial(trained, **save), size, package, fsdp_size, [0, 1, 2])[0]
    _, expected = run(trained, size, package, fsdp_size, [0, 1, 2, 3, 4])[0]
    for loaded, end in run(partial(trained, **load), other_size, package, other_fsdp_size, [3, 4]):
        assert_same(loaded, saved)
        assert_same(end, expected)
    keys = {name.split("/")[0] for name in saved[0] if name.endswith(("/0.weight", "/1.weight"))}
    assert keys == {"master", *KEYS[package]}
    assert {name.split("/")[0] for name in saved[0] if name.endswith("/2.weight")} == {
        *("master", "exp_avg", "exp_avg_sq", "step")
    }


def test_a_layout_that_would_share_blocks_is_refused_by_name(run_ranks, tmp_path):
    """256 rows on 3 ranks are 86, 86 and 84; a block has the elements of 8 rows."""
    state = str(tmp_path / "state")
    run_ranks(partial(trained, save=state), 2, "bitsandbytes", None, [0])
    with pytest.raises(RankError, match=r"is not the state of this engine: .*absmax1/0\.weight"):
        run_ranks(partial(trained, load=state), 3, "bitsandbytes", None, [1])


WIDE = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}


def in_bitsandbytes(function, *args):
    with only("bitsandbytes"):
        return function(*args)


def test_an_engine_goes_on_bitwise(run_ranks, tmp_path):
    folder, state = str(tiny_folder("llama", tmp_path / "model", **WIDE)), str(tmp_path / "state")
    arguments = folder, state, {}, {"optimizer": "adamw_8bit"}
    first = run_ranks(in_bitsandbytes, 2, uninterrupted, *arguments)
    second = run_ranks(in_bitsandbytes, 2, resumed, *arguments)
    for (before, saved, rest, end), (loaded, again, same_end) in zip(first, second, strict=True):
        assert len(before) == BEFORE
        assert len(rest) == AFTER
        assert_same(loaded, saved)
        assert again == rest
        assert_same(same_end, end)


def test_experts_that_other_ranks_share_have_the_same_state_and_go_on_within_1e_5(run_ranks, tmp_path):
    size = {"num_experts": 4, "hidden_size": 128, "moe_intermediate_size": 128}
    folder, state = str(tiny_folder("qwen3_moe", tmp_path / "model", **size)), str(tmp_path / "state")
    kind = {"optimizer": "adamw_8bit"}
    _, saved, rest, _ = run_ranks(in_bitsandbytes, 4, uninterrupted, folder, state, {"ep_size": 2}, kind)[0]
    assert "absmax1/model.layers.0.mlp.experts.down_proj" in saved[0]
    ((loaded, again, _),) = run_ranks(in_bitsandbytes, 1, resumed, folder, state, {}, kind)
    assert_same(loaded, saved)
    assert [row["loss"] for row in again] == pytest.approx([row["loss"] for row in rest], abs=1e-5)
