"""The command line: every command's options, with their types and help."""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

from shardwise import __version__
from shardwise.config import RECIPES, TrainerConfig
from shardwise.config.base import EXAMPLE_OVERRIDE
from shardwise.config.engine import DtypeName

_path = os.path.expanduser
"""Turns `~` at the start into the home folder: shells do not expand it after `--model=`."""
_MODEL = "a run's output folder (its newest checkpoint), a model folder or a hub name"
_HELP = {
    "sft": "supervised fine-tuning",
    "preference": "preference training (DPO, IPO, SimPO, ORPO, KTO)",
    "reward-model": "a model that scores answers, from pairs of them",
    "distill": "a student learns a teacher's distributions over the whole vocabulary",
    "rl": "reinforcement learning (GRPO and its family, PPO with a critic, distillation)",
    "eval": "accuracy on held-out prompts: greedy, pass@k, mean@n, maj@n",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments. Overrides may stand before and after options, which argparse alone does not allow."""
    parser = argparse.ArgumentParser(
        prog="shardwise", description="LLM post-training on PyTorch FSDP2, from a laptop CPU to a GPU cluster."
    )
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in RECIPES:
        _add_recipe(commands.add_parser(name, help=_HELP[name], description=f"{name}: {_HELP[name]}"), name)
    for name, (add, text) in _COMMANDS.items():
        add(commands.add_parser(name, help=text, description=f"{name}: {text}"))
    options, rest = parser.parse_known_args(arguments)
    strange = [text for text in rest if text.startswith("-") or "=" not in text or options.command not in RECIPES]
    if strange:
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(strange)}")
    if options.command in RECIPES:
        try:
            options.overrides = [_text(override) for override in (*options.overrides, *rest)]
        except argparse.ArgumentTypeError as error:
            commands.choices[options.command].error(f"override {error}")
    return options


class _OneConfig(argparse.Action):
    """Refuses a second config, which would silently take the place of the first."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"-c {values}: there is a config already; give one file, and the other's keys as key=value")
        setattr(namespace, self.dest, values)


def _add_recipe(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument(
        "-c",
        "--config",
        type=_path,
        action=_OneConfig,
        help="YAML file; without it every key comes from overrides and defaults (docs/config.md lists all keys)",
    )
    command.add_argument("overrides", nargs="*", metavar="key=value", help=f"e.g. {EXAMPLE_OVERRIDE}")
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


def _add_quickstart(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output-dir", type=_path, default="runs/quickstart", help="default: %(default)s")
    command.add_argument("--seed", type=_seed, default=0, help="default: %(default)s")
    _add_nproc(command, default=None)


def _add_generate(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", type=_path, help=_MODEL)
    command.add_argument(
        "-p", "--prompt", type=_text, action="append", help="may be repeated; without it prompts are read from stdin"
    )
    command.add_argument(
        "--max-tokens", type=int, help="default: 256, or what the prompt leaves of the model's context"
    )
    command.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    command.add_argument("--num-completions", type=int, default=1, help="default: %(default)s")
    command.add_argument("--raw", action="store_true", help="no chat template: continue the prompt as it is")
    command.add_argument("--seed", type=_seed, default=0, help="default: %(default)s")


def _add_export(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", type=_path, help=_MODEL)
    _add_target(command, dtype_of="the source's config")
    command.add_argument(
        "--stall-timeout-seconds",
        type=_seconds,
        default=TrainerConfig().stall_timeout_seconds,
        help="how long it may take before it ends as one that hangs; default: %(default)s",
    )
    _add_nproc(command, default=1)


def _add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "source", type=_path, help="verl's global_step_N or its actor/, or a folder with a .metadata file (DCP)"
    )
    _add_target(command, dtype_of="config.json")
    command.add_argument(
        "--model",
        type=_path,
        help="a folder with config.json and tokenizer; default: the huggingface/ that verl writes",
    )
    command.add_argument(
        "--prefix", help='what stands before the model\'s names in a DCP folder, such as "app.model."; default: found'
    )
    command.add_argument(
        "-c",
        "--config",
        type=_path,
        help="YAML file of the run that goes on: AdamW's states are taken over for trainer.resume",
    )
    command.add_argument("--recipe", choices=["sft", "preference", "rl"], help="what --config is a config of")


def _add_parity(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", type=_path, help=_MODEL)
    command.add_argument("--engine", choices=["embedded", "vllm"], default="embedded", help="default: %(default)s")
    command.add_argument(
        "--dtype",
        choices=get_args(DtypeName),
        default="float32",
        help="what both compute in; default: %(default)s, where mistakes stand out from rounding",
    )
    command.add_argument("-p", "--prompt", type=_text, action="append", help="may be repeated; default: two short ones")
    command.add_argument("--max-tokens", type=int, default=16, help="of a completion; default: %(default)s")


def _add_replay(command: argparse.ArgumentParser) -> None:
    command.add_argument("bundle", type=_path, help="a folder in nonfinite/ of a run's output folder")
    command.add_argument("--micro-batch", type=int, metavar="K", help="only the K-th, from 0, of every rank")


def _add_schema(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", nargs="?", choices=list(RECIPES), help="default: all of them")
    command.add_argument("--markdown", action="store_true", help="a table of keys, defaults and meanings instead")


def _add_target(command: argparse.ArgumentParser, *, dtype_of: str) -> None:
    """Adds the options that say where a model is written, and how."""
    command.add_argument("target", type=_path, help="a new or empty folder")
    command.add_argument("--dtype", choices=get_args(DtypeName), help=f"default: the one that {dtype_of} names")
    command.add_argument(
        "--max-shard-size", type=_file_size, default="5GB", help="of a weight file; default: %(default)s"
    )


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
    except UnicodeEncodeError:  # Python passes other bytes on as half surrogate pairs
        encoding = sys.getfilesystemencoding()
        how = "" if encoding == "utf-8" else ", as which Python reads arguments here; set PYTHONUTF8=1"
        raise argparse.ArgumentTypeError(f"{os.fsencode(text)!r} is not {encoding.upper()}{how}") from None
    return text


def _file_size(text: str) -> str:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"{text} is not a size; give a number and a unit, such as 500MB or 5GB")
    return text


_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "quickstart": (_add_quickstart, "from nothing to a policy improved by RL, on this machine, offline"),
    "generate": (_add_generate, f"talk to a model: {_MODEL}"),
    "export": (_add_export, "write a model as a Hugging Face folder, in another dtype"),
    "import-checkpoint": (
        _add_import,
        "write another trainer's checkpoint (verl's FSDP, plain DCP) as a Hugging Face folder",
    ),
    "parity": (_add_parity, "compare what trainer and rollout engine compute, module by module and token by token"),
    "replay": (_add_replay, "run an optimizer step again that was skipped, and name what went bad"),
    "schema": (_add_schema, "the JSON schema of the config, for editors"),
}
"""Name of a command that is no recipe -> the function that adds its options, and its help."""
