from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_models import random_samples, tiny_folder
from torch.distributed.tensor import DTensor

from shardwise.config import EngineConfig, OptimizerConfig, TrainingError
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.recipes.losses import sft_loss

CPU = torch.device("cpu")
PARTS = ["params", "grads", "optimizer"]


def local_bytes(tensors):
    """What the shards occupy."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).untyped_storage().nbytes() for t in tensors)


def tensors_of(engine, part):
    return engine._tensors(part)


def train_with_trips(folder, trips, options):
    """Three optimizer steps; before each, and between gradient and update, the parts named in `trips` make a trip.
    Returns the weights, and the sizes of every part while one is away."""
    engine = TrainEngine.build(
        Path(folder),
        EngineConfig(**options),
        device=CPU,
        optimizer=OptimizerConfig(learning_rate=1e-2),
        total_steps=3,
    )
    step = pack(random_samples([9, 7, 7, 5, 4]), num_shards=dist.get_world_size(), max_tokens=12)
    batches, away = step.shards[dist.get_rank()], []

    def trip():
        for part in trips:
            others = [other for other in ("params", "grads") if other != part]
            before = {other: local_bytes(tensors_of(engine, other)) for other in (part, *others)}
            engine.offload(part)
            after = {other: local_bytes(tensors_of(engine, other)) for other in (part, *others)}
            away.append((before[part], after[part], [before[o] for o in others] == [after[o] for o in others]))
            engine.onload(part)
            assert local_bytes(tensors_of(engine, part)) == before[part]

    for _ in range(3):
        trip()
        engine.forward_backward(batches, sft_loss, step.denominators)
        trip()
        engine.optim_step()
    logprobs = engine.forward(batches)[0].logprobs
    return {name: tensor.clone() for name, tensor in engine.named_weights(torch.float32)}, logprobs, away


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="resharded", marks=pytest.mark.full),
        pytest.param({"reshard_after_forward": False}, id="kept"),
    ],
)
@pytest.mark.parametrize("part", ["params", "grads", "optimizer"])
def test_training_with_trips_to_the_host_gives_the_same_bits(run_ranks, tmp_path, part, options):
    """Each part leaves on its own, the others stay where they are."""
    folder = str(tiny_folder("llama", tmp_path))
    expected = run_ranks(train_with_trips, 2, folder, [], options)
    found = run_ranks(train_with_trips, 2, folder, [part], options)
    for (weights, logprobs, away), (other_weights, other_logprobs, _) in zip(found, expected, strict=True):
        assert all(torch.equal(weights[name], other_weights[name]) for name in other_weights)
        assert torch.equal(logprobs, other_logprobs)
        sizes = [before for before, _, _ in away]
        assert len(sizes) == 6
        assert all(after == 0 and others_stay for _, after, others_stay in away)
        assert max(sizes) > 0
        assert all(sizes) or part != "params"


def leave_and_step(folder):
    """How many bytes of each part are on the device after everything has left, and after everything is back."""
    engine = TrainEngine.build(Path(folder), EngineConfig(), device=CPU, optimizer=OptimizerConfig())
    step = pack(random_samples([9, 7]), num_shards=2, max_tokens=12)
    batches = step.shards[dist.get_rank()]
    for _ in range(2):
        engine.forward_backward(batches, sft_loss, step.denominators)
        engine.optim_step()
    engine.forward_backward(batches, sft_loss, step.denominators)
    here = {part: local_bytes(tensors_of(engine, part)) for part in PARTS}
    engine.offload(*PARTS)
    away = {part: local_bytes(tensors_of(engine, part)) for part in PARTS}
    engine.onload(*PARTS)
    return here, away, {part: local_bytes(tensors_of(engine, part)) for part in PARTS}


def test_trap_27_optimizer_states_that_never_leave(run_ranks, tmp_path):
    """Trap 27: after `offload` nothing of the two moments is on the device."""
    for here, away, back in run_ranks(leave_and_step, 2, str(tiny_folder("llama", tmp_path))):
        assert away == dict.fromkeys(PARTS, 0)
        assert back == here
        assert here["optimizer"] >= 2 * here["params"] * 0.9  # FSDP pads parameters, not the moments
        assert here["grads"] > 0


def work_without(folder):
    """What each call says without the parts that it works with."""
    engine = TrainEngine.build(Path(folder), EngineConfig(), device=CPU, optimizer=OptimizerConfig())
    step = pack(random_samples([9, 7]), num_shards=1, max_tokens=16)
    calls = {
        "forward": lambda: engine.forward(step.shards[0]),
        "forward_backward": lambda: engine.forward_backward(step.shards[0], sft_loss, step.denominators),
        "optim_step": engine.optim_step,
        "named_weights": lambda: list(engine.named_weights(torch.float32)),
    }
    calls["forward_backward"]()
    calls["optim_step"]()
    calls["forward_backward"]()
    told = {}
    for part in PARTS:
        engine.offload(part)
        for name, call in calls.items():
            if part == "params" or (part, name) in (("grads", "forward_backward"), ("grads", "optim_step")):
                with pytest.raises(TrainingError) as error:
                    call()
                told[part, name] = str(error.value)
        engine.onload(part)
    engine.offload(*PARTS)
    with pytest.raises(TrainingError) as error:
        engine.optim_step()
    told["all", "optim_step"] = str(error.value)
    engine.onload(*PARTS)
    engine.optim_step()
    return told


def test_an_engine_says_which_parts_it_has_to_have_back(run_ranks, tmp_path):
    """Torch would read memory that is gone."""
    (told,) = run_ranks(work_without, 1, str(tiny_folder("llama", tmp_path)))
    assert len(told) == 7
    for (part, _), message in told.items():
        named = ", ".join(PARTS) if part == "all" else part
        assert message == f"{named} of this engine are offloaded, and this needs them; call onload first"
