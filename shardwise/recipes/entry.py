"""The commands as every rank runs them: from options or a config to an exit code."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

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
    TrainingConfig,
)
from shardwise.config.engine import DtypeName
from shardwise.console import warn
from shardwise.controller.local import RankGroup
from shardwise.controller.stall import StallLimit
from shardwise.engine import take_device
from shardwise.families import other_release
from shardwise.recipes.distill import train as train_distill
from shardwise.recipes.evaluate import evaluate
from shardwise.recipes.export import export
from shardwise.recipes.import_checkpoint import import_checkpoint
from shardwise.recipes.parity import EngineName, parity
from shardwise.recipes.preference import train as train_preference
from shardwise.recipes.quickstart import quickstart
from shardwise.recipes.rank.process import run_rank
from shardwise.recipes.replay import replay
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


def run_quickstart(*, output_dir: str, seed: int) -> int:
    """Runs the quickstart on this rank. Returns the exit code of this process."""
    return run_rank(
        lambda group: quickstart(Path(output_dir), group, seed=seed),
        timeout_seconds=EngineConfig().collective_timeout_seconds,
        output_dir=output_dir,
    )


def run_export(*, source: str, target: str, dtype: str | None, max_shard_size: str, stall: StallLimit) -> int:
    """Exports a model on this rank. Returns the exit code of this process."""
    return run_rank(
        lambda group: export(source, target, group, dtype=dtype, max_shard_size=max_shard_size),
        timeout_seconds=EngineConfig().collective_timeout_seconds,
        stall=stall,
    )


def run_import(
    *,
    source: str,
    target: str,
    model: str | None,
    prefix: str | None,
    dtype: str | None,
    max_shard_size: str,
    run: TrainingConfig | None,
) -> int:
    """Imports another trainer's checkpoint on this rank. Returns the exit code of this process."""

    def recipe(group: RankGroup) -> None:
        import_checkpoint(
            source, target, group, model=model, prefix=prefix, dtype=dtype, max_shard_size=max_shard_size, run=run
        )

    return run_rank(recipe, timeout_seconds=EngineConfig().collective_timeout_seconds)


def run_parity(
    *, model: str, engine: EngineName, dtype: DtypeName, prompts: Sequence[str] | None, max_tokens: int
) -> int:
    """Compares trainer and rollout engine on this rank. Returns the exit code of this process: 0 if they agree."""
    return _run_alone(
        "parity",
        lambda: parity(model, take_device(0), engine=engine, dtype=dtype, prompts=prompts, max_tokens=max_tokens),
    )


def run_replay(*, bundle: str, micro_batch: int | None) -> int:
    """Replays a bundle on this rank. Returns the exit code of this process: 0 if what was recorded happened again."""
    return _run_alone("replay", lambda: replay(bundle, take_device(0), micro_batch=micro_batch))


def _run_alone(command: str, ask: Callable[[], bool]) -> int:
    """Runs a command that answers yes or no and takes one process. Returns the exit code: 0 for yes, 1 for no."""
    outcome = [False]

    def recipe(group: RankGroup) -> None:
        if group.size > 1:
            raise ConfigError(f"shardwise {command} runs on one process, and this job has {group.size}")
        outcome[0] = ask()

    code = run_rank(recipe, timeout_seconds=EngineConfig().collective_timeout_seconds)
    return code or int(not outcome[0])
