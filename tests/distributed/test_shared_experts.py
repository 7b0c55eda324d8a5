"""Engines whose ranks share experts (`engine.ep_size`): loss, gradients and what is trained are those of engines whose
ranks compute all experts, and so are the files. `test_layout_invariance.py` has them with every other option, and
`test_proven.py` every family."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hub_weights import hub_weights
from safetensors.torch import load_file
from tiny_models import random_samples, tiny_folder

from shardwise.config import EngineConfig, FrozenEngineConfig, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.data.synthetic import train_tokenizer
from shardwise.engine import TrainEngine
from shardwise.engine.gathering import gathered
from shardwise.engine.weights import stream_weights
from shardwise.ops import plain_name
from shardwise.recipes.losses import sft_loss

CPU = torch.device("cpu")
LENGTHS = [11, 4, 7, 1, 16, 3, 9, 5]


def train(engine, *, ulysses_size=1, num_steps=2):
    """The loss and the gradient of every step; then all weights, by both of their names."""
    num_shards = dist.get_world_size() // ulysses_size
    steps = []
    for number in range(num_steps):
        step = pack(random_samples(LENGTHS, prompt_tokens=1, seed=number), num_shards=num_shards, max_tokens=16)
        metrics = engine.forward_backward(step.shards[dist.get_rank() // ulysses_size], sft_loss, step.denominators)
        loss = torch.tensor(metrics["train/loss"].result())
        dist.all_reduce(loss)
        gradients = {
            plain_name(name): gathered(parameter.grad, torch.float32)
            for name, parameter in engine._model.hf_model.named_parameters()
            if parameter.grad is not None
        }
        norm = engine.optim_step()["train/grad_norm"].result()
        steps.append((loss.item() / ulysses_size, norm, gradients))
    model = engine._model.hf_model
    return steps, dict(stream_weights(model, torch.float32)), dict(hub_weights(model, torch.float32))


def build(folder, keys, optimizer="adamw"):
    config = OptimizerConfig(optimizer=optimizer, learning_rate=1e-3, max_grad_norm=0.5)
    return TrainEngine.build(Path(folder), EngineConfig(**keys), device=CPU, optimizer=config)


def differences(found, expected):
    """The largest of the loss, of the norm, of any gradient (relative to its largest element), of any weight."""
    (steps, weights, hub), (other_steps, other_weights, other_hub) = found, expected
    assert weights.keys() == other_weights.keys()
    assert list(hub) == list(other_hub)
    worst = [0.0] * 4
    for (loss, norm, gradients), (other_loss, other_norm, others) in zip(steps, other_steps, strict=True):
        assert gradients.keys() == others.keys()
        ratios = [
            ((gradient - others[name]).abs().max() / others[name].abs().max()).item()
            for name, gradient in gradients.items()
            if others[name].any() or gradient.any()  # a vision tower has none from text
        ]
        assert all(math.isfinite(ratio) for ratio in ratios)
        worst[:3] = map(max, worst[:3], [abs(loss / other_loss - 1), abs(norm / other_norm - 1), max(ratios)])
    for ours, theirs in ((weights, other_weights), (hub, other_hub)):
        worst[3] = max(worst[3], *((tensor - theirs[name]).abs().max().item() for name, tensor in ours.items()))
    return worst


LAYOUTS = {
    "4 ranks share": (4, {"ep_size": 4}, 8),
    "two parts of 4 ranks": (4, {"ep_size": 2}, 8),
    "3 experts for 2 ranks": (4, {"ep_size": 2}, 6),
    "1 expert for 2 ranks": (4, {"ep_size": 2}, 2),
    "two replicas": (4, {"ep_size": 2, "fsdp_size": 2}, 8),
    "with sequences shared by the same ranks": (4, {"ep_size": 2, "ulysses_size": 2}, 8),
    "with sequences shared by all ranks": (4, {"ep_size": 2, "ulysses_size": 4}, 8),
    "each expert's weights kept": (4, {"ep_size": 2, "reshard_after_forward": False}, 8),
    "kept over 2 ranks": (4, {"ep_size": 2, "reshard_after_forward": 2}, 8),
    "in host memory": (4, {"ep_size": 2, "offload_policy": True}, 6),
    "reduced at the end": (4, {"ep_size": 2, "reduce_gradients": "last_micro_batch"}, 6),
    "compiled": (2, {"ep_size": 2, "compile_layers": True}, 4),
}


def difference_of_layout(folder, keys, optimizer):
    ulysses_size = keys.get("ulysses_size", 1)
    return differences(
        train(build(folder, keys, optimizer), ulysses_size=ulysses_size), train(build(folder, {}, optimizer))
    )


WITH_MUON = [("3 experts for 2 ranks", "muon"), pytest.param("two replicas", "muon", marks=pytest.mark.full)]
REPEATED = {
    "two replicas",
    "two parts of 4 ranks",
    "1 expert for 2 ranks",
    "with sequences shared by the same ranks",
    "each expert's weights kept",
    "kept over 2 ranks",
    "compiled",
    "reduced at the end",
    "in host memory",
}
"""What other cells have the parts of, and what is compiled: only in `make test-full`."""


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *(pytest.param(name, "adamw", marks=pytest.mark.full if name in REPEATED else ()) for name in LAYOUTS),
        *WITH_MUON,
    ],
)
def test_two_steps_on_any_layout_are_those_of_whole_experts(run_ranks, tmp_path, name, optimizer):
    world_size, keys, num_experts = LAYOUTS[name]
    folder = tiny_folder("qwen3_moe", tmp_path, num_experts=num_experts, num_attention_heads=4)
    for loss, norm, gradient, weight in run_ranks(
        difference_of_layout, world_size, str(folder), keys, optimizer, timeout_seconds=180
    ):
        assert loss <= 2e-6
        assert norm <= 1e-5
        assert gradient <= 1e-5
        assert weight <= 2e-4


def files_of(folder, target, keys):
    """Bytes that this rank read, and elements of expert weights that it holds."""
    engine = TrainEngine.build(Path(folder), FrozenEngineConfig(**keys), device=CPU)
    engine.export_hf(Path(target), train_tokenizer(["2+3=5"], vocab_size=261))
    held = {n: p.to_local().numel() for n, p in engine._model.hf_model.named_parameters() if ".experts." in n}
    return engine.num_bytes_read, sum(held.values())


@pytest.mark.parametrize("num_experts", [8, 6, 2])
def test_ranks_read_and_hold_their_part_of_the_experts_and_export_what_they_read(run_ranks, tmp_path, num_experts):
    folder = tiny_folder("qwen3_moe", tmp_path / "model", num_experts=num_experts)
    source = load_file(folder / "model.safetensors")
    whole = sum(tensor.numel() for name, tensor in source.items() if ".experts." in name)
    total = {}
    for ep_size in (1, 2):
        target = tmp_path / f"ep {ep_size}"
        ranks = run_ranks(files_of, 4, str(folder), str(target), {"ep_size": ep_size})
        total[ep_size] = sum(num_bytes for num_bytes, _ in ranks)
        assert sum(held for _, held in ranks) == whole
        exported = load_file(target / "model.safetensors")
        assert exported.keys() == source.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in source.items())
    assert total[1] == total[2]
    if num_experts == 8:
        assert [held for _, held in ranks] == [whole / 4] * 4
