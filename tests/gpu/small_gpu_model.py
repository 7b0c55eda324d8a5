"""A model large enough to use the GPU's kernels and small enough to build in a second, and what tests do with it."""

from pathlib import Path

import torch
from tiny_models import random_samples
from torch import Tensor

from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.data.packing import PackedStep, pack
from shardwise.engine import TrainEngine
from shardwise.recipes.losses import sft_loss

VOCAB = 1000
LENGTHS = (300, 5, 64, 64, 129)
"""Runs of equal length, a very short sequence, and lengths that no tile size divides."""


def save_model(folder: Path, **overrides) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

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
    Qwen3ForCausalLM(Qwen3Config(**config | overrides)).save_pretrained(folder)
    return folder


def build(folder: Path, device: torch.device, *options: str, learning_rate: float = 1e-3) -> TrainEngine:
    """`options` are `key=value` of EngineConfig."""
    optimizer = OptimizerConfig(learning_rate=learning_rate)
    return TrainEngine.build(folder, EngineConfig.load(None, options), device=device, optimizer=optimizer)


def packed(*, num_batches: int = 1) -> PackedStep:
    """One optimizer step on `num_batches` micro-batches."""
    samples = random_samples([length for length in LENGTHS for _ in range(num_batches)], vocab=VOCAB)
    step = pack(samples, num_shards=1, max_tokens=sum(LENGTHS) + 64)
    assert len(step.shards[0]) == num_batches
    return step


def loss_of(engine: TrainEngine, step: PackedStep) -> float:
    return engine.forward_backward(step.shards[0], sft_loss, step.denominators)["train/loss"].result()


def gradient_of(engine: TrainEngine) -> Tensor:
    """All gradients of a world of 1 in one float32 vector on the host."""
    parts = [p.grad.to_local().float().flatten().cpu() for p in engine._model.parameters() if p.grad is not None]
    return torch.cat(parts)


def loss_and_gradient(folder: Path, device: torch.device, *options: str, num_batches: int = 1) -> tuple[float, Tensor]:
    engine = build(folder, device, *options)
    return loss_of(engine, packed(num_batches=num_batches)), gradient_of(engine)


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
