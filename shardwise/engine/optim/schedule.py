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


def missed_peak(config: OptimizerConfig, total_steps: int, *, key: str) -> str | None:
    """Returns a warning about a run whose warm-up and decay leave no step at the peak, None for others. It is no error,
    because a config is often tried for a few steps.

    Args:
        total_steps: optimizer steps of the whole run.
        key: the config's own key, for the message.
    """
    if config.warmup_steps + config.lr_decay_steps < total_steps:
        return None
    given = {"warmup_steps": config.warmup_steps, "lr_decay_steps": config.lr_decay_steps}
    keys = [f"{key}.{name}" for name, steps in given.items() if steps]
    taken = " + ".join(f"{key}.{name}={steps}" for name, steps in given.items() if steps)
    return (
        f"{taken} of the run's {total_steps} optimizer steps leave none at the peak, {key}.learning_rate="
        f"{config.learning_rate}; lower {' or '.join(keys)}, or raise trainer.total_steps"
    )
