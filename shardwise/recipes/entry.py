"""The commands as every rank runs them: from options or a config to an exit code."""

from collections.abc import Callable
from functools import partial

import torch

from shardwise.config import (
    ConfigError,
    DistillConfig,
    EngineConfig,
    EvalConfig,
    PreferenceConfig,
    RecipeConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from shardwise.console import warn
from shardwise.controller.local import RankGroup
from shardwise.controller.stall import StallLimit
from shardwise.engine import take_device
from shardwise.families import other_release
from shardwise.recipes.distill import train as train_distill
from shardwise.recipes.evaluate import evaluate
from shardwise.recipes.preference import train as train_preference
from shardwise.recipes.rank.process import run_rank
from shardwise.recipes.reward_model import train as train_reward_model
from shardwise.recipes.rl import train as train_rl
from shardwise.recipes.sft import train as train_sft


def run_recipe(config: RecipeConfig) -> int:
    """Runs the recipe of a config on this rank. Returns the exit code of this process."""

    def recipe(group: RankGroup) -> None:
        if note := other_release():
            warn(f"{note}; make models proves them with that one")
        match config:
            case SFTConfig():
                train_sft(config, group)
            case PreferenceConfig():
                train_preference(config, group)
            case RewardModelConfig():
                train_reward_model(config, group)
            case DistillConfig():
                train_distill(config, group)
            case RLConfig():
                train_rl(config, group)
            case EvalConfig():
                evaluate(config, group)

    start = partial(run_rank, recipe, timeout_seconds=config.engine.collective_timeout_seconds, config=config)
    if isinstance(config, EvalConfig):
        limit = StallLimit.of("eval.stall_timeout_seconds", config.eval.stall_timeout_seconds)
        return start(output_dir=config.eval.output_dir, stall=limit)
    trainer = config.trainer
    return start(
        split=config.rollout.split if isinstance(config, RLConfig) else None,
        faults=trainer.faults,
        output_dir=trainer.output_dir,
        stall=StallLimit.of("trainer.stall_timeout_seconds", trainer.stall_timeout_seconds),
        save_timeout_seconds=trainer.save_timeout_seconds,
    )


def run_command(
    command: Callable[[RankGroup], object],
    *,
    alone: str | None = None,
    output_dir: str | None = None,
    stall: StallLimit | None = None,
) -> int:
    """Runs a command that has no config on this rank. Returns the exit code of this process.

    Args:
        alone: name of a command that takes one process; None: of one for any number of them.
        output_dir, stall: as `run_rank` takes them.
    """

    def recipe(group: RankGroup) -> None:
        if alone is not None and group.size > 1:
            raise ConfigError(
                f"shardwise {alone} runs on one process, and this job has {group.size}; start it without torchrun"
            )
        command(group)

    timeout_seconds = EngineConfig().collective_timeout_seconds
    return run_rank(recipe, timeout_seconds=timeout_seconds, output_dir=output_dir, stall=stall)


def run_question(command: str, ask: Callable[[torch.device], bool]) -> int:
    """Runs a command that answers yes or no and takes one process. Returns the exit code: 0 for yes, 1 for no."""
    outcome = [False]

    def answer(_: RankGroup) -> None:
        outcome[0] = ask(take_device(0))

    return run_command(answer, alone=command) or int(not outcome[0])
