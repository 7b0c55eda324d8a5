"""Steps that hypothesis draws, the same on every rank: whatever their lengths, masks, order and split over ranks and
micro-batches, with Ulysses and without, a loss has one value and one gradient."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_losses_on_layouts import HEADS, LOSSES, filled
from tiny_models import random_samples, tiny_folder

from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.engine.gathering import gathered
from shardwise.recipes.losses import LossSource

NUM_STEPS = 40
LAYOUTS = [{}, {"ulysses_size": 2}]
PAIRED = {name for name, (kind, *_) in LOSSES.items() if kind in ("preference", "reward_model")} - {"kto"}


@st.composite
def steps(draw):
    """The name of a loss, samples whose masks may be empty, an order of them, and what a micro-batch may hold."""
    name = draw(st.sampled_from(sorted(LOSSES)))
    size = 2 if name in PAIRED else 1
    lengths = draw(st.lists(st.integers(2, 12), min_size=size, max_size=8))
    lengths = lengths[: len(lengths) // size * size]
    samples = filled(name, random_samples(lengths, prompt_tokens=1, seed=draw(st.integers(0, 99))))
    if name not in HEADS and name not in PAIRED:  # answers that are compared have one
        for sample in samples:
            sample.loss_mask[draw(st.integers(1, len(sample.token_ids))) :] = False
    order = draw(st.permutations(range(len(lengths) // size)))
    return name, samples, [unit * size + k for unit in order for k in range(size)], draw(st.integers(24, 60))


def batches_of(samples, num_shards, size, max_tokens):
    step = pack(samples, num_shards=num_shards, max_tokens=max_tokens, keep_together=size)
    return step.shards, step.denominators


def value_and_gradients(engine, shards, shard, denominators, name):
    kind, config, numbers = LOSSES[name]
    loss = LossSource.of(kind, config, **numbers).make()
    metrics = engine.forward_backward(shards[shard], loss.function, denominators, with_entropy=loss.with_entropy)
    total = torch.tensor(metrics["train/loss"].result(), dtype=torch.float64)
    dist.all_reduce(total)
    named = engine._model.hf_model.named_parameters()
    gradients = {key: gathered(p.grad, torch.float32) for key, p in named if p.grad is not None}
    engine._model.zero_grad()
    return total.item(), gradients


def differences_in_drawn_steps(folder):
    """By loss the number of steps; and what differed from all samples in one micro-batch on one rank."""
    heads = {HEADS.get(name, "logprobs") for name in LOSSES}

    def build(head, **layout):
        config = EngineConfig(**layout)
        optimizer = OptimizerConfig()
        return TrainEngine.build(Path(folder), config, device=torch.device("cpu"), optimizer=optimizer, head=head)

    alone = {head: build(head, fsdp_size=1) for head in heads}
    spread = {head: [build(head, **layout) for layout in LAYOUTS] for head in heads}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seen, wrong = {}, []

    @settings(
        max_examples=NUM_STEPS,
        derandomize=True,  # so every rank draws the same
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(steps())
    def compare(step):
        name, samples, order, max_tokens = step
        seen[name] = seen.get(name, 0) + 1
        head, size = HEADS.get(name, "logprobs"), 2 if name in PAIRED else 1
        (whole,), denominators = batches_of(samples, 1, size, 1000)
        empty = batches_of(samples[:size], 2, size, 1000)[0][1]
        shards = [whole, *[empty] * (world_size - 1)]
        expected_loss, expected = value_and_gradients(alone[head], shards, rank, denominators, name)
        largest = max((g.abs().max().item() for g in expected.values()), default=0.0)
        for layout, engine in zip(LAYOUTS, spread[head], strict=True):
            sharing = layout.get("ulysses_size", 1)
            shuffled = [samples[place] for place in order]
            shards, counted = batches_of(shuffled, world_size // sharing, size, max_tokens)
            loss, gradients = value_and_gradients(engine, shards, rank // sharing, counted, name)
            assert counted == denominators
            if abs(loss / sharing - expected_loss) > 2e-6 * max(1.0, abs(expected_loss)):
                wrong.append((name, layout, "loss", loss / sharing, expected_loss))
            for key, gradient in gradients.items():
                error = (gradient - expected[key]).abs().max().item()
                if not error <= 1e-5 * expected[key].abs().max().item() + 1e-6 * largest:
                    wrong.append((name, layout, key, error, largest))

    compare()
    return seen, wrong


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_loss_is_one_whatever_is_drawn(run_ranks, tmp_path, world_size):
    folder = str(tiny_folder("qwen3", tmp_path))
    results = run_ranks(differences_in_drawn_steps, world_size, folder, timeout_seconds=300)
    assert all(seen == results[0][0] for seen, _ in results), "the ranks drew other steps"
    assert sum(results[0][0].values()) == NUM_STEPS
    assert len(results[0][0]) >= 10, "of the losses"
    assert [wrong for _, wrong in results] == [[]] * world_size
