"""Where a run starts: at its beginning, or from a checkpoint that an earlier process left."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config import ConfigError, TrainingConfig, changes_that_matter, require_known_keys
from shardwise.engine.verified_files import read_sealed_json, write_sealed_json
from shardwise.recipes.checkpoints import CHECKPOINTS, step_folders
from shardwise.recipes.manifest import MANIFEST

STATE = "state"
"""In a checkpoint: the training state of every engine in a folder of its own, and RUN."""
RUN = "run.json"


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a run goes on from."""

    checkpoint: Path
    step: int
    """Done already."""
    parts: dict[str, Any] | None
    """What the parts of the recipe keep between steps, by their names; None in an imported checkpoint: they begin."""
    in_place: bool
    """Whether it is one of the run's own output folder, whose files are then continued."""


def find_start(config: TrainingConfig) -> Start | None:
    """What trainer.resume says: None for a run that starts at its beginning.

    Raises:
        ConfigError: there is no such checkpoint, or it was trained with another config; names the keys. ModelError: it
            is damaged.
    """
    trainer = config.trainer
    require_known_keys(trainer.resume_allow, config)
    if trainer.resume == "never":
        return None
    own = Path(trainer.output_dir)
    checkpoint = _newest(own) if trainer.resume == "auto" else _named(Path(trainer.resume))
    if checkpoint is None:
        return None
    content = read_sealed_json(checkpoint / STATE / RUN)
    _require_same(checkpoint, content, config)
    in_place = checkpoint.parent.resolve() == (own / CHECKPOINTS).resolve()
    return Start(checkpoint, content["step"], content["parts"], in_place)


def write_run(checkpoint: Path, config: TrainingConfig, *, step: int, parts: dict[str, Any] | None) -> None:
    """Writes what `find_start` reads. Raises OSError."""
    (checkpoint / STATE).mkdir(exist_ok=True)
    content = {"recipe": _recipe(config), "step": step, "config": config.model_dump(mode="json"), "parts": parts}
    write_sealed_json(checkpoint / STATE / RUN, content)


def _newest(run: Path) -> Path | None:
    """The newest whole checkpoint that can be resumed from."""
    return next((folder for folder in step_folders(run).values() if _is_whole(folder)), None)


def _is_whole(checkpoint: Path) -> bool:
    return (checkpoint / MANIFEST).is_file() and (checkpoint / STATE / RUN).is_file()


def _named(path: Path) -> Path:
    found = path if _is_whole(path) else _newest(path)
    if found is None:
        raise ConfigError(
            f"trainer.resume={path} is neither a checkpoint with a training state (manifest.json and state/) nor the "
            "folder of a run that has one; give such a path, auto or never"
        )
    return found


def _require_same(checkpoint: Path, content: dict[str, Any], config: TrainingConfig) -> None:
    anew = "or start a new run with trainer.resume=never, which moves what is in trainer.output_dir aside"
    if content["recipe"] != _recipe(config):
        raise ConfigError(
            f"{checkpoint} is of a run of another recipe ({content['recipe']}, this is {_recipe(config)}); give "
            f"another trainer.output_dir, {anew}"
        )
    if changes := changes_that_matter(content["config"], config, allowed=config.trainer.resume_allow):
        listed = ", ".join(f"{key} was {before!r} and is {now!r}" for key, (before, now) in changes.items())
        keys = ", ".join(changes)
        raise ConfigError(
            f"{checkpoint} was trained with another config: {listed}; set it back, allow it with "
            f"trainer.resume_allow=[{keys}], {anew}"
        )


def _recipe(config: TrainingConfig) -> str:
    return type(config).__name__.removesuffix("Config")
