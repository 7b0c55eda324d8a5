"""The command `shardwise`. Checks everything that can be checked without torch, then starts the ranks.

Exit codes: controller/exit_codes.py, and 0 for done.
"""

import argparse
import errno
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast, get_args

from shardwise import __version__
from shardwise.config import (
    ConfigError,
    DistillConfig,
    EvalConfig,
    PreferenceConfig,
    RecipeConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
    TrainerConfig,
    TrainingConfig,
    UserError,
    as_user_error,
)
from shardwise.config.engine import DtypeName
from shardwise.config.reference import json_schema, markdown
from shardwise.controller.exit_codes import USER_ERROR
from shardwise.controller.launch import PROCESS_STARTED, is_launched, launch
from shardwise.controller.output import lasting_output
from shardwise.controller.restarts import Restarts
from shardwise.controller.signals import interruptible_imports
from shardwise.controller.stall import StallLimit
from shardwise.controller.watchdog import REPORTS
from shardwise.recipes.checkpointing.writer_lock import require_no_writer
from shardwise.recipes.rank.heavy_imports import heavy_imports

RECIPES: dict[str, type[RecipeConfig]] = {
    "sft": SFTConfig,
    "preference": PreferenceConfig,
    "reward-model": RewardModelConfig,
    "distill": DistillConfig,
    "rl": RLConfig,
    "eval": EvalConfig,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. A user's mistake is one line on stderr, never a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parse(arguments)
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
            from shardwise.recipes.preflight import check_inputs
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
    with heavy_imports():
        from shardwise.recipes.rank.entry import run_recipe

    return run_recipe(config)


def _launch_training(config: TrainingConfig, options: argparse.Namespace, arguments: list[str]) -> int:
    from shardwise.recipes.checkpointing.checkpoints import newest_mark
    from shardwise.recipes.stopping import without_saving

    trainer, command = config.trainer, _rank_command(arguments)
    again = [*command, "trainer.faults=[]"]  # what is planned happens once
    return launch(
        command,
        nproc=options.nproc,
        stop_grace_seconds=trainer.stop_grace_seconds,
        faults=Path(trainer.output_dir) / REPORTS,
        stall=StallLimit.of("trainer.stall_timeout_seconds", trainer.stall_timeout_seconds),
        without_saving=lambda: without_saving(trainer),
        started=PROCESS_STARTED,  # a time limit counts what is done before the ranks are
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
            from shardwise.recipes.preflight import default_num_ranks
        nproc = options.nproc or default_num_ranks()
        if nproc > 1:
            return launch(
                _rank_command(arguments),
                nproc=nproc,
                stop_grace_seconds=TrainerConfig().stop_grace_seconds,
                faults=Path(options.output_dir) / REPORTS,
            )
    with heavy_imports():
        from shardwise.recipes.rank.entry import run_quickstart

    return run_quickstart(output_dir=options.output_dir, seed=options.seed)


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
        from shardwise.recipes.rank.entry import run_export

    return run_export(
        source=options.source,
        target=options.target,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        stall=_stall_limit(options),
    )


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
        from shardwise.recipes.rank.entry import run_import

    return run_import(
        source=options.source,
        target=options.target,
        model=options.model,
        prefix=options.prefix,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        run=cast(TrainingConfig | None, run),
    )


@lasting_output()
def _parity(options: argparse.Namespace) -> int:
    with heavy_imports():
        from shardwise.recipes.rank.entry import run_parity

    return run_parity(
        model=options.model,
        engine=options.engine,
        dtype=options.dtype,
        prompts=options.prompt,
        max_tokens=options.max_tokens,
    )


@lasting_output()
def _replay(options: argparse.Namespace) -> int:
    with heavy_imports():
        from shardwise.recipes.rank.entry import run_replay

    return run_replay(bundle=options.bundle, micro_batch=options.micro_batch)


def _schema(recipe: str | None, *, as_markdown: bool) -> str:
    """Of one recipe, or of all of them: JSON by name, Markdown one after the other."""
    chosen = RECIPES if recipe is None else {recipe: RECIPES[recipe]}
    if as_markdown:
        return "\n".join(markdown(config, title=name) for name, config in chosen.items())
    schemas = {name: json_schema(config) for name, config in chosen.items()}
    return json.dumps(schemas if recipe is None else schemas[recipe], indent=2)


def _print(text: str) -> None:
    with _standard_output():
        print(text.rstrip("\n"), flush=True)


@contextmanager
def _standard_output() -> Iterator[None]:
    """Around writes to standard output: a broken pipe ends them silently, a full disk is a ConfigError."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        if error.errno != errno.EPIPE:
            raise ConfigError(f"standard output cannot be written to: {error}") from None


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Overrides may stand before and after options, which argparse alone does not allow."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    strange = [text for text in rest if text.startswith("-") or "=" not in text or options.command not in RECIPES]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    if rest:
        options.overrides += rest
    return options


def _is_rank() -> bool:
    """Started by `launch` or torchrun."""
    return "RANK" in os.environ


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardwise", description="LLM post-training on PyTorch FSDP2, from a laptop CPU to a GPU cluster."
    )
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    helps = {
        "sft": "supervised fine-tuning",
        "preference": "preference training (DPO, IPO, SimPO, ORPO, KTO)",
        "reward-model": "a model that scores answers, from pairs of them",
        "distill": "a student learns a teacher's distributions over the whole vocabulary",
        "rl": "reinforcement learning (GRPO and its family, PPO with a critic, distillation)",
        "eval": "accuracy on held-out prompts: greedy, pass@k, mean@n, maj@n",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=f"{name}: {text}")
        command.add_argument("-c", "--config", help="YAML file; without it every key comes from overrides and defaults")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. trainer.total_steps=20")
        _add_nproc(command, default=1)
        if name != "eval":
            command.add_argument(
                "--max-restarts",
                type=_not_negative,
                default=0,
                metavar="N",
                help="restarts from the newest checkpoint after a rank died, hung or failed (default: %(default)s)",
            )
        command.add_argument("--dry-run", action="store_true", help="check the config, print it resolved, and stop")
    quickstart = commands.add_parser(
        "quickstart", help="from nothing to a policy improved by RL, on this machine, offline"
    )
    quickstart.add_argument("--output-dir", default="runs/quickstart", help="default: %(default)s")
    quickstart.add_argument("--seed", type=_seed, default=0, help="default: %(default)s")
    _add_nproc(quickstart, default=None)
    generate = commands.add_parser(
        "generate", help="talk to a model: a run's output folder, a model folder or a hub name"
    )
    generate.add_argument("model")
    generate.add_argument(
        "-p", "--prompt", type=_text, action="append", help="may be repeated; without it prompts are read from stdin"
    )
    generate.add_argument(
        "--max-tokens", type=int, help="default: 256, or what the prompt leaves of the model's context"
    )
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    generate.add_argument("--num-completions", type=int, default=1, help="default: %(default)s")
    generate.add_argument("--raw", action="store_true", help="no chat template: continue the prompt as it is")
    generate.add_argument("--seed", type=_seed, default=0, help="default: %(default)s")
    export = commands.add_parser("export", help="write a model as a Hugging Face folder, in another dtype")
    export.add_argument("source", help="a run's output folder (its newest checkpoint), a model folder or a hub name")
    export.add_argument("target", help="a new or empty folder")
    export.add_argument("--dtype", choices=get_args(DtypeName), help="default: the one that the source's config names")
    export.add_argument(
        "--max-shard-size", type=_file_size, default="5GB", help="of a weight file; default: %(default)s"
    )
    export.add_argument(
        "--stall-timeout-seconds",
        type=_seconds,
        default=TrainerConfig().stall_timeout_seconds,
        help="how long it may take before it ends as one that hangs; default: %(default)s",
    )
    _add_nproc(export, default=1)
    foreign = commands.add_parser(
        "import-checkpoint", help="write another trainer's checkpoint (verl's FSDP, plain DCP) as a Hugging Face folder"
    )
    foreign.add_argument("source", help="verl's global_step_N or its actor/, or a folder with a .metadata file (DCP)")
    foreign.add_argument("target", help="a new or empty folder")
    foreign.add_argument(
        "--model", help="a folder with config.json and tokenizer; default: the huggingface/ that verl writes"
    )
    foreign.add_argument(
        "--prefix", help='what stands before the model\'s names in a DCP folder, such as "app.model."; default: found'
    )
    foreign.add_argument("--dtype", choices=get_args(DtypeName), help="default: the one that config.json names")
    foreign.add_argument(
        "--max-shard-size", type=_file_size, default="5GB", help="of a weight file; default: %(default)s"
    )
    foreign.add_argument(
        "-c", "--config", help="YAML file of the run that goes on: AdamW's states are taken over for trainer.resume"
    )
    foreign.add_argument("--recipe", choices=["sft", "preference", "rl"], help="what --config is a config of")
    parity = commands.add_parser(
        "parity", help="compare what trainer and rollout engine compute, module by module and token by token"
    )
    parity.add_argument("model", help="a run's output folder (its newest checkpoint), a model folder or a hub name")
    parity.add_argument("--engine", choices=["embedded", "vllm"], default="embedded", help="default: %(default)s")
    parity.add_argument(
        "--dtype",
        choices=get_args(DtypeName),
        default="float32",
        help="what both compute in; default: %(default)s, where mistakes stand out from rounding",
    )
    parity.add_argument("-p", "--prompt", type=_text, action="append", help="may be repeated; default: two short ones")
    parity.add_argument("--max-tokens", type=int, default=16, help="of a completion; default: %(default)s")
    replay = commands.add_parser("replay", help="run an optimizer step again that was skipped, and name what went bad")
    replay.add_argument("bundle", help="a folder in nonfinite/ of a run's output folder")
    replay.add_argument("--micro-batch", type=int, metavar="K", help="only the K-th, from 0, of every rank")
    schema = commands.add_parser("schema", help="the JSON schema of the config, for editors")
    schema.add_argument("recipe", nargs="?", choices=list(RECIPES), help="default: all of them")
    schema.add_argument("--markdown", action="store_true", help="a table of keys, defaults and meanings instead")
    return parser


def _add_nproc(command: argparse.ArgumentParser, *, default: int | None) -> None:
    shown = "2, or 1 on a machine with one GPU" if default is None else default
    command.add_argument(
        "--nproc",
        type=_positive,
        default=default,
        help=f"ranks to start on this machine (default: {shown}); leave it out under torchrun",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks; use 1 or more")
    return int(text)


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number of restarts; use 0 or more")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text} is not a seed; use a number of 0 or more, below 2^63")
    return int(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a time; give a number of seconds above 0")
    return value


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # how Python hands on other bytes
        raise argparse.ArgumentTypeError(f"{os.fsencode(text)!r} is not UTF-8") from None
    return text


def _file_size(text: str) -> str:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"{text} is not a size; give a number and a unit, such as 500MB or 5GB")
    return text
