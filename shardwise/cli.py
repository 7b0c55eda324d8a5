"""The command `shardwise`. Checks everything that can be checked without torch, then starts the ranks.

Exit codes: controller/exit_codes.py, and 0 for done.
"""

import argparse
import errno
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

from shardwise.command_line import parse
from shardwise.config import (
    RECIPES,
    ConfigError,
    EvalConfig,
    RecipeConfig,
    TrainerConfig,
    TrainingConfig,
    UserError,
    as_user_error,
)
from shardwise.config.reference import markdown, page
from shardwise.controller.exit_codes import USER_ERROR
from shardwise.controller.launch import PROCESS_STARTED, die_with_launcher, is_launched, launch
from shardwise.controller.output import lasting_output
from shardwise.controller.restarts import Restarts
from shardwise.controller.signals import interruptible_imports
from shardwise.controller.stall import StallLimit
from shardwise.controller.watchdog import REPORTS
from shardwise.recipes.checkpointing.writer_lock import require_no_writer
from shardwise.recipes.rank.heavy_imports import heavy_imports


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. A user's mistake is one line on stderr, never a traceback."""
    die_with_launcher()  # before imports that take seconds
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parse(arguments)
    try:
        match options.command:
            case command if command in RECIPES:
                return _run_recipe(options, arguments)
            case "quickstart":
                return _run_quickstart(options, arguments)
            case "generate":
                return _generate(options)
            case "export":
                return _export(options, arguments)
            case "import-checkpoint":
                return _import_checkpoint(options)
            case "parity":
                return _parity(options)
            case "replay":
                return _replay(options)
            case _:
                _print(_schema(options.recipe, as_markdown=options.markdown))
                return 0
    except (UserError, OSError) as error:
        if not isinstance(mistake := as_user_error(error), UserError):
            raise
        print(f"error: {mistake}", file=sys.stderr)
        return USER_ERROR


def _run_recipe(options: argparse.Namespace, arguments: list[str]) -> int:
    config = RECIPES[options.command].load(options.config, options.overrides)
    if os.environ.get("RANK", "0") == "0" and not is_launched():
        if isinstance(config, EvalConfig):  # before torch is imported, which takes seconds
            require_no_writer(Path(config.eval.output_dir), key="eval.output_dir")
        else:
            require_no_writer(Path(config.trainer.output_dir))
        with interruptible_imports():
            from shardwise.recipes.preflight import check_inputs, check_layouts
        if options.nproc > 1:  # a config for other machines is checked with 1, too
            check_layouts(config, options.nproc)
        check_inputs(config)
    if options.dry_run:
        _print(config.to_yaml())
        return 0
    return _start_recipe(config, options, arguments)


@lasting_output()
def _start_recipe(config: RecipeConfig, options: argparse.Namespace, arguments: list[str]) -> int:
    if isinstance(config, EvalConfig):
        if not _is_rank() and options.nproc > 1:
            return launch(
                _rank_command(arguments),
                nproc=options.nproc,
                faults=Path(config.eval.output_dir) / REPORTS,
                stall=StallLimit.of("eval.stall_timeout_seconds", config.eval.stall_timeout_seconds),
            )
    elif not _is_rank() and (options.nproc > 1 or options.max_restarts > 0):
        return _launch_training(config, options, arguments)
    elif not is_launched() and options.max_restarts > 0:
        raise ConfigError("--max-restarts is of ranks that shardwise --nproc starts; give torchrun its own")
    with heavy_imports():
        from shardwise.recipes.entry import run_recipe

    return run_recipe(config)


def _launch_training(config: TrainingConfig, options: argparse.Namespace, arguments: list[str]) -> int:
    from shardwise.recipes.checkpointing.checkpoints import newest_mark
    from shardwise.recipes.stopping import without_saving

    trainer, command = config.trainer, _rank_command(arguments)
    again = [*command, "trainer.faults=[]"]  # a planned fault happens once
    return launch(
        command,
        nproc=options.nproc,
        stop_grace_seconds=trainer.stop_grace_seconds,
        faults=Path(trainer.output_dir) / REPORTS,
        stall=StallLimit.of("trainer.stall_timeout_seconds", trainer.stall_timeout_seconds),
        without_saving=lambda: without_saving(trainer),
        started=PROCESS_STARTED,  # a time limit includes what is done before the ranks start
        restarts=Restarts(
            options.max_restarts,
            command=again,
            resuming_command=[*again, "trainer.resume=auto"],
            newest_checkpoint=lambda: newest_mark(Path(trainer.output_dir)),
        ),
    )


def _rank_command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "shardwise", *arguments]


@lasting_output()
def _run_quickstart(options: argparse.Namespace, arguments: list[str]) -> int:
    if not _is_rank():
        with interruptible_imports():
            from shardwise.recipes.quickstart import default_num_ranks
        nproc = options.nproc or default_num_ranks()
        if nproc > 1:
            return launch(
                _rank_command(arguments),
                nproc=nproc,
                stop_grace_seconds=TrainerConfig().stop_grace_seconds,
                faults=Path(options.output_dir) / REPORTS,
            )
    with heavy_imports():
        from shardwise.recipes.entry import run_command
        from shardwise.recipes.quickstart import quickstart

    return run_command(partial(quickstart, Path(options.output_dir), seed=options.seed), output_dir=options.output_dir)


def _generate(options: argparse.Namespace) -> int:
    with heavy_imports():
        from shardwise.recipes.generate import converse

    with _standard_output():
        converse(
            options.model,
            prompts=options.prompt,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            num_completions=options.num_completions,
            apply_chat_template=not options.raw,
            seed=options.seed,
        )
    return 0


@lasting_output()
def _export(options: argparse.Namespace, arguments: list[str]) -> int:
    if not _is_rank() and options.nproc > 1:
        return launch(_rank_command(arguments), nproc=options.nproc, stall=_stall_limit(options))
    with heavy_imports():
        from shardwise.recipes.entry import run_command
        from shardwise.recipes.export import export

    command = partial(
        export, options.source, options.target, dtype=options.dtype, max_shard_size=options.max_shard_size
    )
    return run_command(command, stall=_stall_limit(options))


def _stall_limit(options: argparse.Namespace) -> StallLimit:
    return StallLimit(options.stall_timeout_seconds, "--stall-timeout-seconds")


@lasting_output()
def _import_checkpoint(options: argparse.Namespace) -> int:
    if (options.config is None) != (options.recipe is None):
        raise ConfigError(
            "--config and --recipe go together: the config of the run to continue, and the command it is for"
        )
    run = None if options.config is None else RECIPES[options.recipe].load(options.config)
    with heavy_imports():
        from shardwise.recipes.entry import run_command
        from shardwise.recipes.import_checkpoint import import_checkpoint

    command = partial(
        import_checkpoint,
        options.source,
        options.target,
        model=options.model,
        prefix=options.prefix,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        run=cast(TrainingConfig | None, run),
    )
    return run_command(command, alone=options.command)


@lasting_output()
def _parity(options: argparse.Namespace) -> int:
    with heavy_imports():
        from shardwise.recipes.entry import run_question
        from shardwise.recipes.parity import parity

    ask = partial(
        parity,
        options.model,
        engine=options.engine,
        dtype=options.dtype,
        prompts=options.prompt,
        max_tokens=options.max_tokens,
    )
    return run_question(options.command, ask)


@lasting_output()
def _replay(options: argparse.Namespace) -> int:
    with heavy_imports():
        from shardwise.recipes.entry import run_question
        from shardwise.recipes.replay import replay

    return run_question(options.command, partial(replay, options.bundle, micro_batch=options.micro_batch))


def _schema(recipe: str | None, *, as_markdown: bool) -> str:
    """Returns the schema of one recipe or, by name, of all of them, as JSON; or Markdown, in which each key stands
    once."""
    chosen = RECIPES if recipe is None else {recipe: RECIPES[recipe]}
    if as_markdown:
        return page(RECIPES) if recipe is None else markdown(RECIPES[recipe], title=recipe)
    from shardwise.config.json_schema import json_schema

    schemas = {name: json_schema(config) for name, config in chosen.items()}
    return json.dumps(schemas if recipe is None else schemas[recipe], indent=2)


def _print(text: str) -> None:
    with _standard_output():
        print(text.rstrip("\n"), flush=True)


@contextmanager
def _standard_output() -> Iterator[None]:
    """Guards writes to standard output: a broken pipe ends them silently, a full disk is a ConfigError."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        if error.errno != errno.EPIPE:
            raise ConfigError(f"standard output cannot be written to: {error}") from None


def _is_rank() -> bool:
    """Whether `launch` or torchrun has started this process."""
    return "RANK" in os.environ
