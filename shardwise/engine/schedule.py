"""The learning-rate schedule."""

import math

from shardwise.config import OptimizerConfig


def schedule_at(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step` (from 0) out of `total_steps`, as a share of the peak, in [0, 1].

    Warm-up rises as (step + 1) / (warmup_steps + 1), so that the first step already learns; linear and cosine then fall
    to min_lr_ratio at the last step; wsd stays and falls linearly over the last lr_decay_steps (Hu et al. 2024).
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    fall = 1 - config.min_lr_ratio
    match config.lr_schedule:
        case "constant":
            return 1.0
        case "wsd":
            progress = (step - (total_steps - 1 - config.lr_decay_steps)) / config.lr_decay_steps
            return 1 - fall * min(1.0, max(0.0, progress))
        case "linear" | "cosine":
            progress = (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
            progress = min(1.0, progress)
            shape = progress if config.lr_schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
            return 1 - fall * shape
