"""Engines that train, save and go on, and all that their state is."""

from pathlib import Path

import torch
import torch.distributed as dist
from sharded_lora import wholes
from tiny_models import random_samples

from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.recipes.losses import sft_loss

LENGTHS = [9, 7, 12, 5, 4, 11]
BEFORE, AFTER = 3, 3
OVERFLOW = 1
"""The step whose loss is too large for float16, and for it alone."""


def build(folder, engine, optimizer, seed=3, *, with_trained=True) -> TrainEngine:
    """Without trained weights these are NaN: nothing may come of them."""
    built = TrainEngine.build(
        Path(folder),
        EngineConfig(**engine),
        device=torch.device("cpu"),
        optimizer=OptimizerConfig(**{"learning_rate": 3e-3, "weight_decay": 0.1} | optimizer),
        total_steps=BEFORE + AFTER,
        seed=seed,
        with_trained=with_trained,
    )
    if not with_trained:
        for parameter in built._optimizer.parameters:
            parameter.data.fill_(torch.nan)
    return built


def steps(engine, numbers, ulysses_size=1):
    """The metrics of optimizer steps, each on samples of its own. Losses are sums over ranks."""
    num_shards = dist.get_world_size() // ulysses_size
    rows = []
    for number in numbers:

        def loss_fn(outputs, batch, denominators, number=number):
            loss, metrics = sft_loss(outputs, batch, denominators)
            return loss * (1e6 if number == OVERFLOW and engine._compute_dtype == torch.float16 else 1.0), metrics

        step = pack(random_samples(LENGTHS, seed=number), num_shards=num_shards, max_tokens=32)
        batches = step.shards[dist.get_rank() // ulysses_size]
        metrics = engine.forward_backward(batches, loss_fn, step.denominators)
        loss = torch.tensor([metrics.pop("train/loss").result()]) / ulysses_size
        dist.all_reduce(loss)
        metrics |= engine.optim_step()
        values = {name: value.result() for name, value in metrics.items() if "/busy/" not in name}  # seconds
        rows.append(values | {"loss": loss.item()})
    return rows


def state_of(engine):
    """Every tensor of the state, whole, and the numbers."""
    tensors = wholes(engine._optimizer.named_tensors())
    return tensors, engine._optimizer.numbers()


def uninterrupted(folder, state, engine, optimizer):
    """Trains, saves, trains on: the state that was saved, then the rest."""
    trained = build(folder, engine, optimizer)
    size = engine.get("ulysses_size", 1)
    before = steps(trained, range(BEFORE), size)
    trained.state.save(Path(state))
    saved = state_of(trained)
    return before, saved, steps(trained, range(BEFORE, BEFORE + AFTER), size), state_of(trained)


def resumed(folder, state, engine, optimizer):
    fresh = build(folder, engine, optimizer, with_trained=False)
    fresh.state.load(Path(state))
    loaded = state_of(fresh)
    return loaded, steps(fresh, range(BEFORE, BEFORE + AFTER), engine.get("ulysses_size", 1)), state_of(fresh)


def assert_same(found, expected):
    (tensors, numbers), (others, other_numbers) = found, expected
    assert numbers == other_numbers
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name


LORA = {"rank": 3, "alpha": 12.0, "target_modules": ["q_proj", "v_proj", "down_proj"], "dropout": 0.3}
