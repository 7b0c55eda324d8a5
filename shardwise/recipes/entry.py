"""From a process to a rank at work: joins the group, then commands (rank 0) or serves (the others)."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from shardwise.config import (
    DistillConfig,
    EngineConfig,
    EvalConfig,
    PreferenceConfig,
    RecipeConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from shardwise.controller.launch import follow_lifeline, note_failure
from shardwise.controller.local import RankGroup, serve
from shardwise.controller.process_group import Rank, process_group
from shardwise.engine import take_device
from shardwise.recipes.distill import train as train_distill
from shardwise.recipes.evaluate import evaluate
from shardwise.recipes.export import export
from shardwise.recipes.preference import train as train_preference
from shardwise.recipes.quickstart import quickstart
from shardwise.recipes.reward_model import train as train_reward_model
from shardwise.recipes.rl import train as train_rl
from shardwise.recipes.sft import train as train_sft
from shardwise.recipes.workers import Worker


def run_recipe(config: RecipeConfig) -> int:
    """Runs the recipe of a config on this rank. Returns the exit code of this process."""

    def recipe(group: RankGroup) -> None:
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

    return run_rank(recipe, timeout_seconds=config.engine.collective_timeout_seconds)


def run_quickstart(*, output_dir: str, seed: int) -> int:
    """Runs the quickstart on this rank. Returns the exit code of this process."""
    return run_rank(
        lambda group: quickstart(Path(output_dir), group, seed=seed),
        timeout_seconds=EngineConfig().collective_timeout_seconds,
    )


def run_export(*, source: str, target: str, dtype: str | None, max_shard_size: str) -> int:
    """Exports a model on this rank. Returns the exit code of this process."""
    return run_rank(
        lambda group: export(source, target, group, dtype=dtype, max_shard_size=max_shard_size),
        timeout_seconds=EngineConfig().collective_timeout_seconds,
    )


def run_rank(recipe: Callable[[RankGroup], None], *, timeout_seconds: int) -> int:
    """Runs `recipe` on rank 0 of this job and a serving loop on every other rank.

    Returns:
        The exit code of this process.
    """
    follow_lifeline()
    disable_progress_bar()  # ours is the only one
    rank = Rank.from_environment()
    with ExitStack() as stack:
        try:
            device = take_device(rank.local_rank)
            control = stack.enter_context(process_group(rank, device_type=device.type, timeout_seconds=timeout_seconds))
            worker = Worker(device)
            if rank.rank == 0:
                group = RankGroup(worker, control, timeout_seconds=timeout_seconds)
                recipe(group)
                group.shutdown()
            else:
                serve(worker, control)
        except Exception as error:  # the one place where a rank's failure becomes an exit code
            # Noted before the group is left: that closes the connections, whereupon the other ranks fail too.
            return note_failure(error, rank.rank)
    return 0
