"""A model large enough to use the GPU's kernels and small enough to build in a second, and what tests do with it."""

import gc
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from tiny_models import random_samples
from torch import Tensor

from shardwise.config import AlgorithmConfig, CriticConfig, EngineConfig, OptimizerConfig
from shardwise.data.packing import PackedStep, pack, unpack
from shardwise.engine import TrainEngine
from shardwise.ops import plain_name
from shardwise.recipes.losses import SFT_LOSS, Loss, policy_loss, value_loss
from shardwise.types import Sample

VOCAB = 1000
LENGTHS = (300, 5, 64, 64, 129)
"""Runs of equal length, a very short sequence, and lengths that no tile size divides."""
CLIPS = {"clip_low": 0.1, "clip_high": 0.25, "dual_clip": 1.5}
LOSSES = {
    "sft": SFT_LOSS,
    "policy": Loss(
        policy_loss(AlgorithmConfig(policy_loss=CLIPS, num_epochs=2, kl_coef=0.3), kl_coef=0.3), with_entropy=True
    ),
    "value": Loss(value_loss(CriticConfig(value_loss={"name": "clipped", "clip": 0.5}))),
}
MARGIN = 0.08
"""How far samples keep from where a clip begins, in nats and in values."""


def save_model(folder: Path, family: str = "qwen3", **overrides) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config | overrides)).save_pretrained(folder)
    return folder


def build(folder: Path, device: torch.device, *options: str, loss: str = "sft", **settings) -> TrainEngine:
    """`options` are `key=value` of EngineConfig, `settings` are of OptimizerConfig."""
    return TrainEngine.build(
        folder,
        EngineConfig.load(None, options),
        device=device,
        optimizer=OptimizerConfig(**{"learning_rate": 1e-3} | settings),
        head="token_values" if loss == "value" else "logprobs",
    )


def drawn(num_batches: int) -> list[Sample]:
    return random_samples([length for length in LENGTHS for _ in range(num_batches)], vocab=VOCAB)


def packed(
    samples: list[Sample] | None = None,
    *,
    num_batches: int = 1,
    num_shards: int = 1,
    max_tokens: int = sum(LENGTHS) + 64,
) -> PackedStep:
    """One optimizer step on `num_batches` micro-batches of every shard."""
    step = pack(drawn(num_batches) if samples is None else samples, num_shards=num_shards, max_tokens=max_tokens)
    assert len(step.shards[0]) == num_batches
    return step


@cache
def samples_for(loss: str, folder: Path, device: torch.device, num_batches: int = 1) -> list[Sample]:
    """Random tokens with what the loss reads: old logprobs and values about those of the model in float32, on both
    sides of every clip, and none so near to one that rounding chooses the side, where the gradient jumps."""
    samples = drawn(num_batches)
    if loss == "sft":
        return samples
    step = packed(samples, num_batches=num_batches)
    outputs = build(folder, device, loss=loss).forward(step.shards[0])
    current = unpack(step, [[out.values if loss == "value" else out.logprobs for out in outputs]])
    generator = torch.Generator().manual_seed(1)
    filled = []
    for row, (sample, own) in enumerate(zip(samples, current, strict=True)):
        moved, other = 0.4 * torch.randn(2, len(own), generator=generator)
        if loss == "value":
            fields = {"values": own - away_from(moved, -0.5, 0.5), "returns": own + other.sign()}
        else:
            old = own - away_from(moved, math.log(0.9), math.log(1.25), math.log(1.5))
            advantages = torch.full_like(own, -1.3 if row % 2 else 0.9)
            fields = {"old_logprobs": old, "rollout_logprobs": old, "ref_logprobs": own + other}
            fields["advantages"] = advantages
        filled.append(replace(sample, **fields))
    return filled


def away_from(gaps: Tensor, *bounds: float) -> Tensor:
    for bound in bounds:
        gaps = torch.where((gaps - bound).abs() < MARGIN, bound + MARGIN, gaps)
    return gaps


def loss_of(engine: TrainEngine, step: PackedStep, loss: str = "sft", *, shard: int = 0) -> float:
    """After a forward and a backward pass."""
    wanted = LOSSES[loss]
    metrics = engine.forward_backward(
        step.shards[shard], wanted.function, step.denominators, with_entropy=wanted.with_entropy
    )
    return metrics["train/loss"].result()


def gradients_of(engine: TrainEngine) -> dict[str, Tensor]:
    """The whole gradients by name, float32, on the host."""
    named = engine._model.hf_model.named_parameters()
    return {plain_name(name): p.grad.full_tensor().float().cpu() for name, p in named if p.grad is not None}


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def loss_and_gradient(
    folder: Path, device: torch.device, *options: str, num_batches: int = 1, loss: str = "sft"
) -> tuple[float, Tensor]:
    engine = build(folder, device, *options, loss=loss)
    step = packed(samples_for(loss, folder, device, num_batches), num_batches=num_batches)
    return loss_of(engine, step, loss), flat(gradients_of(engine))


def train(engine: TrainEngine, num_steps: int) -> list[float]:
    """Losses of steps on the same batch."""
    step, losses = packed(), []
    for _ in range(num_steps):
        losses.append(loss_of(engine, step))
        engine.optim_step()
    return losses


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Of vectors, by their norms."""
    return ((value - truth).norm() / truth.norm()).item()


def allocated() -> int:
    """Bytes on the device that something still holds, as asked for: blocks of the allocator may be larger."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]
