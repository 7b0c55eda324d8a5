"""Training in float16: the loss is scaled, the scale is the same on every rank, an overflow skips the step on all."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_models import random_samples, tiny_folder

from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.recipes.losses import sft_loss

NUM_STEPS = 12


def train(folder, keys, poisoned_step):
    """Loss, loss scale and share of skipped steps of every step; one loss of rank 0 may be far too large."""
    engine = TrainEngine.build(
        Path(folder),
        EngineConfig(**keys),
        device=torch.device("cpu"),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        total_steps=NUM_STEPS,
    )
    step = pack(random_samples([9, 7, 12, 5]), num_shards=dist.get_world_size(), max_tokens=32)
    rows = []
    for index in range(NUM_STEPS):

        def loss_fn(outputs, batch, denominators, index=index):
            loss, metrics = sft_loss(outputs, batch, denominators)
            return loss * (1e6 if index == poisoned_step and dist.get_rank() == 0 else 1.0), metrics

        metrics = engine.forward_backward(step.shards[dist.get_rank()], loss_fn, step.denominators)
        metrics |= engine.optim_step()
        scale = metrics["train/loss_scale"].result() if "train/loss_scale" in metrics else None
        rows.append((metrics["train/loss"].result(), scale, metrics["train/nonfinite_fraction"].result()))
    weights = {name: tensor.clone() for name, tensor in engine.named_weights(torch.float32)}
    return rows, weights


def test_f38_float16_learns_as_float32_does(run_ranks, tmp_path):
    folder = str(tiny_folder("llama", tmp_path))
    full = run_ranks(train, 2, folder, {}, None)
    half = run_ranks(train, 2, folder, {"param_dtype": "float16"}, None)
    losses = [
        [sum(parts) for parts in zip(*([row[0] for row in rows] for rows, _ in ranks), strict=True)]
        for ranks in (full, half)
    ]
    assert losses[0][-1] < losses[0][0] - 0.5
    # The first scale may overflow; a skipped step leaves the weights, so the next one sees the same loss.
    taken = [loss for loss, row in zip(losses[1], half[0][0], strict=True) if row[2] == 0]
    assert NUM_STEPS - 3 <= len(taken) <= NUM_STEPS
    torch.testing.assert_close(torch.tensor(taken), torch.tensor(losses[0][: len(taken)]), rtol=0.02, atol=0.02)
    assert all(row[1] is None for row in full[0][0])
    assert [row[1] for row in half[0][0]] == [row[1] for row in half[1][0]]


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(run_ranks, tmp_path):
    folder = str(tiny_folder("llama", tmp_path))
    (first, first_weights), (second, second_weights) = run_ranks(train, 2, folder, {"param_dtype": "float16"}, 4)
    scales, skipped = [row[1] for row in first], [row[2] for row in first]
    assert scales == [row[1] for row in second]
    assert skipped == [row[2] for row in second]
    assert skipped[4] == 1.0
    assert scales[5] == scales[4] / 2
    assert all(torch.isfinite(weight).all() for weight in first_weights.values())
    for name, weight in first_weights.items():
        assert torch.equal(weight, second_weights[name]), name


def gradients(folder, keys):
    """Of a loss that is divided by so many tokens as a large step has, without the scale; how many are 0."""
    engine = TrainEngine.build(
        Path(folder), EngineConfig(**keys), device=torch.device("cpu"), optimizer=OptimizerConfig()
    )
    step = pack(random_samples([9, 7, 12, 5]), num_shards=dist.get_world_size(), max_tokens=32)
    denominators = replace(step.denominators, num_tokens=10_000 * step.denominators.num_tokens)
    engine.forward_backward(step.shards[dist.get_rank()], sft_loss, denominators)
    found = torch.cat([p.grad.full_tensor().flatten() for p in engine._model.parameters()])
    return found / engine._optimizer.loss_scale


@pytest.mark.parametrize(
    ("keys", "otherwise"),
    [
        ({"reduce_dtype": "float16"}, {}),
        ({"param_dtype": "bfloat16", "reduce_dtype": "float16"}, {"param_dtype": "bfloat16"}),
        ({"module_precision": [{"module": "model.layers.*.mlp", "param_dtype": "float16"}]}, {}),
    ],
    ids=["reduced", "reduced from bfloat16", "one module"],
)
def test_wherever_gradients_are_float16_the_loss_is_scaled(run_ranks, tmp_path, keys, otherwise):
    """Without a scale 2 % of the gradients of such a step become 0, and the module's have an error of 4 %."""
    folder = str(tiny_folder("llama", tmp_path))
    exact = run_ranks(gradients, 2, folder, otherwise)[0]
    found = run_ranks(gradients, 2, folder, keys)[0]
    assert (found - exact).norm() < 1e-2 * exact.norm()
    assert ((found == 0) & (exact != 0)).float().mean() < 2e-3
