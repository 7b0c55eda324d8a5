"""Finds where a run starts: at its beginning, or from a checkpoint that an earlier process left."""

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from shardwise.config import (
    ConfigError,
    ModelError,
    TrainingConfig,
    changes_of_state,
    changes_that_matter,
    is_among,
    keys_to_allow,
    require_known_keys,
    require_known_length,
    without_places,
)
from shardwise.config.yaml_values import value_of
from shardwise.engine.files.verified_files import read_sealed_json, write_sealed_json
from shardwise.recipes.checkpointing.checkpoints import CHECKPOINTS, WEIGHTS, step_folders
from shardwise.recipes.checkpointing.fingerprints import Fingerprints, changed_files, fingerprints
from shardwise.recipes.checkpointing.manifest import MANIFEST, Manifest, has_whole_weights

STATE = "state"
"""Subfolder of a checkpoint with RUN and, in a folder each, the training states of the engines."""
RUN = "run.json"
_RESTORE = "restore it from a copy, or resume from another checkpoint (trainer.resume=PATH)"
_ITS_WEIGHTS = "from its weights with optimizer states that begin anew (trainer.resume_fallback=weights)"


@dataclass(frozen=True, slots=True)
class Beginning:
    """What trainer.resume named when a run began in its folder.

    Example: `Beginning("/runs/a/checkpoints/step_40", "9f86d081884c4d659a2feaa0c55ad015")`
    """

    path: str
    """Path of a checkpoint or of a run's folder, with links resolved."""
    save_id: str | None
    """Id of the checkpoint that was there, and of its copies; None if an earlier version wrote it."""


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a run resumes from."""

    checkpoint: Path
    step: int
    """The last step that is done."""
    parts: dict[str, Any] | None
    """The state that each part of the recipe keeps between steps, by the part's name; None in an imported checkpoint:
    the parts start anew."""
    in_place: bool
    """Whether it lies in the run's own output folder, whose files are then continued."""
    damage: list[str] = field(default_factory=list, compare=False)
    """What is wrong with newer checkpoints that were passed over, the newest first."""
    begun_from: Beginning | None = None
    """Where the run in this folder began, if trainer.resume named it."""
    lost_states: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Folder in STATE -> what is wrong with the training state there, for states that trainer.resume_fallback=weights
    replaces by the checkpoint's weights."""
    log_lengths: Mapping[str, int] = field(default_factory=dict)
    """Name of a log -> bytes that it had when the checkpoint was saved; early checkpoints do not have them."""


class CheckpointReader(Protocol):
    """Verifies and loads checkpoints that a run may resume from."""

    def verify(self, checkpoint: Path) -> None:
        """Raises ModelError: a file is damaged. Shards of training states are left to `load`."""
        ...

    def load(self, checkpoint: Path) -> Mapping[str, str]:
        """Loads the training state of every engine. Returns folder in STATE -> what is damaged there; the engine of a
        damaged state may have any weights and states.

        Raises ModelError: a state is that of another engine."""
        ...


class _Unread:
    """A CheckpointReader that takes every file for whole, and loads none."""

    def verify(self, checkpoint: Path) -> None: ...

    def load(self, checkpoint: Path) -> Mapping[str, str]:
        return {}


def find_start(
    config: TrainingConfig,
    *,
    files: Fingerprints | None = None,
    reader: CheckpointReader | None = None,
) -> Start | None:
    """Finds the checkpoint that trainer.resume asks for; None for a run that starts at its beginning. A path in
    trainer.resume counts only until this run has saved a checkpoint of its own that began at that path or at a copy of
    what is there; so the same command continues the run.

    Args:
        files: fingerprints of the files that the run reads; None: computes them here, if there is a checkpoint.
        reader: loads the checkpoint; without one only manifest.json and run.json are read.
    Raises:
        ConfigError: there is no such checkpoint, or it was trained with another config, model or data; names the keys.
            ModelError: it is damaged, and so is every earlier one, or trainer.resume_fallback=fail.
    """
    trainer = config.trainer
    require_known_keys(trainer.resume_allow, config)
    if trainer.resume == "never":
        return None
    own, search = Path(trainer.output_dir), _Search(config, files, reader or _Unread())
    named = None if trainer.resume == "auto" else Path(trainer.resume)
    candidates = step_folders(own).values() if named is None else _begun_at(named, step_folders(own).values())
    found = search.newest(candidates, falls_back=trainer.resume_fallback != "fail")
    if found is not None:
        begun_from = _beginning_in(found.run)
    elif named is not None:
        found = search.named(named)
        begun_from = Beginning(os.path.realpath(named), Manifest.read(found.checkpoint).save_id)
    else:
        return None
    return Start(
        found.checkpoint,
        found.run["step"],
        found.run["parts"],
        in_place=os.path.realpath(found.checkpoint.parent) == os.path.realpath(own / CHECKPOINTS),
        damage=found.passed_over,
        begun_from=begun_from,
        lost_states=found.lost_states,
        log_lengths=found.run.get("log_lengths", {}),
    )


def _begun_at(named: Path, folders: Iterable[Path]) -> list[Path]:
    """Returns the checkpoints among `folders` whose run began at the named checkpoint, at a copy of it, or at one that
    the named run has."""
    path, manifests = os.path.realpath(named), map(Manifest.find, _checkpoints_at(named))
    save_ids = {manifest.save_id for manifest in manifests if manifest is not None} - {None}
    beginnings = {folder: _beginning_of(folder) for folder in folders}
    return [
        folder
        for folder, begun_from in beginnings.items()
        if begun_from is not None and (begun_from.path == path or begun_from.save_id in save_ids)
    ]


def _checkpoints_at(named: Path) -> list[Path]:
    """Returns the named checkpoint, or those of the named run, the newest first."""
    return [named] if (named / MANIFEST).is_file() else list(step_folders(named).values())


def _beginning_of(checkpoint: Path) -> Beginning | None:
    """Returns where the run that saved the checkpoint began; None also if that cannot be read."""
    try:
        return _beginning_in(read_sealed_json(checkpoint / STATE / RUN))
    except ModelError:
        return None


def _beginning_in(run: dict[str, Any]) -> Beginning | None:
    """Returns the beginning that the content of a RUN names; early ones have less."""
    path = run.get("begun_from")
    return None if path is None else Beginning(path, run.get("begun_from_save_id"))


def write_run(
    checkpoint: Path,
    config: TrainingConfig,
    *,
    step: int,
    parts: dict[str, Any] | None,
    files: Fingerprints,
    begun_from: Beginning | None = None,
    log_lengths: Mapping[str, int] | None = None,
) -> None:
    """Writes what `find_start` reads.

    Args:
        files: fingerprints of the files that the run reads; empty if it has not begun.
        begun_from, log_lengths: see Start.
    Raises:
        OSError
    """
    (checkpoint / STATE).mkdir(exist_ok=True)
    content = {
        "recipe": _recipe(config),
        "step": step,
        "config": config.model_dump(mode="json"),
        "parts": parts,
        "files": files,
        "begun_from": None if begun_from is None else begun_from.path,
        "begun_from_save_id": None if begun_from is None else begun_from.save_id,
        "log_lengths": dict(log_lengths or {}),
    }
    write_sealed_json(checkpoint / STATE / RUN, content)


@dataclass(frozen=True, slots=True)
class _Found:
    checkpoint: Path
    run: dict[str, Any]
    """Content of its RUN."""
    passed_over: list[str]
    """What is wrong with newer checkpoints that were passed over; see `Start.damage`."""
    lost_states: Mapping[str, str]
    """Folder in STATE -> what is wrong with the training state there; see `Start.lost_states`."""


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for a checkpoint that a run of this config may resume from."""

    config: TrainingConfig
    files: Fingerprints | None
    reader: CheckpointReader

    def newest(self, folders: Collection[Path], *, falls_back: bool) -> _Found | None:
        """Returns the first whole checkpoint with a training state, or with whole weights if trainer.resume_fallback
        accepts these; None if no folder has a state. Raises ModelError: a checkpoint is damaged, and there is none to
        fall back on or `falls_back` is False. ConfigError: a checkpoint is that of another config."""
        damage: list[str] = []
        for folder in folders:
            try:
                if f"{STATE}/{RUN}" not in Manifest.read(folder).files and not (folder / STATE).is_dir():
                    continue
                run = read_sealed_json(folder / STATE / RUN)
            except ModelError as error:
                own = [str(error)]
            else:
                _require_same(folder, run, self.config, self.files)
                own, lost = self._load(folder)
                if not own:
                    return _Found(folder, run, damage, lost)
            damage += own
            if not falls_back:
                weights = f", or resume {_ITS_WEIGHTS}" if self._is_whole_without_shards(folder) else ""
                raise ModelError(f"{damage[0]}; {_RESTORE}{weights}")
        if damage:
            raise ModelError(
                f"{'; '.join(damage)}. No checkpoint to resume from is whole: restore one from a copy, or start anew "
                f"with trainer.resume=never, which moves what is there aside{self._without_states(folders)}"
            )
        return None

    def _load(self, folder: Path) -> tuple[list[str], Mapping[str, str]]:
        """Returns damage that rules the checkpoint out, and the training states that are lost if that is accepted."""
        try:
            self.reader.verify(folder)
        except ModelError as error:
            return [str(error)], {}
        lost = self.reader.load(folder)
        return ([], lost) if self.config.trainer.resume_fallback == "weights" else (list(lost.values()), {})

    def named(self, path: Path) -> _Found:
        """Finds the checkpoint that trainer.resume names. Raises ConfigError: there is none."""
        found = self.newest(_checkpoints_at(path), falls_back=False)
        if found is None:
            raise ConfigError(
                f"trainer.resume={path} is neither a checkpoint with a training state (manifest.json and state/) nor "
                "the folder of a run that has one; give such a path, auto or never"
            )
        return found

    def _without_states(self, folders: Collection[Path]) -> str:
        """Says what a run without a whole checkpoint could resume from, for its error; "" if nothing."""
        if any(self._is_whole_without_shards(folder) for folder in folders):
            return f", or resume {_ITS_WEIGHTS}"
        weights = next((folder / WEIGHTS for folder in folders if has_whole_weights(folder)), None)
        if weights is None:
            return ""
        return (
            f", or begin a run without the optimizer's states: model.path={weights}, which is whole, with another "
            "trainer.output_dir"
        )

    def _is_whole_without_shards(self, folder: Path) -> bool:
        try:
            Manifest.read(folder)
            read_sealed_json(folder / STATE / RUN)
            self.reader.verify(folder)
        except ModelError:
            return False
        return True


def _require_same(
    checkpoint: Path, content: dict[str, Any], config: TrainingConfig, files: Fingerprints | None
) -> None:
    anew = "or start a new run with trainer.resume=never, which moves what is in trainer.output_dir aside"
    if content["recipe"] != _recipe(config):
        raise ConfigError(
            f"{checkpoint} is of a run of another recipe ({content['recipe']}, this is {_recipe(config)}); give "
            f"another trainer.output_dir, {anew}"
        )
    allowed, before = config.trainer.resume_allow, content.get("files", {})
    if before and files is None:
        files = fingerprints(config)
    changed = changed_files(before, files or {})
    moved = [key for key in before if files and key in files and key not in changed]
    changes = changes_that_matter(content["config"], config, allowed=[*allowed, *map(without_places, moved)])
    if changes:
        told = [f"{key} was {_in_yaml(before)} and is {_in_yaml(now)}" for key, (before, now) in changes.items()]
        listed, them = (f" {told[0]}; ", "it") if len(told) == 1 else ("\n  ".join(["", *told]) + "\n", "them")
        elsewhere = "give another trainer.output_dir, " if config.trainer.resume == "auto" else ""
        remedy = f"{elsewhere}set {them} back, allow {them} with trainer.resume_allow=[{_listed(changes, config)}]"
        if others := changes_of_state(changes):
            remedy = (
                f"its training state does not fit another {_listed(others, config)}: {elsewhere}set {them} back"
                f"{_without_state(checkpoint)}"
            )
        raise ConfigError(f"{checkpoint} was trained with another config:{listed}{remedy}, {anew}")
    require_known_length(content["config"], config, num_steps=content["step"])
    refused = {key: name for key, name in changed.items() if not is_among(key, allowed)}
    if refused:
        listed = " and ".join(f"those of {key} ({name})" for key, name in refused.items())
        raise ConfigError(
            f"{checkpoint} was trained with other files: {listed} have changed since; put them back, allow it with "
            f"trainer.resume_allow=[{_listed(refused, config)}], {anew}"
        )


def _in_yaml(value: Any) -> str:
    """Formats a plain value on one line, as an override gives it."""
    match value:
        case str():
            return value if _is_plain(value) else json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{', '.join(map(_in_yaml, value))}]"
        case dict():
            return f"{{{', '.join(f'{key}: {_in_yaml(inner)}' for key, inner in value.items())}}}"
    return json.dumps(value)


def _is_plain(text: str) -> bool:
    """Returns whether YAML reads the text without quotes as itself, alone and in a list."""
    try:
        return value_of(f"[{text}]") == [text] and "\n" not in text
    except yaml.YAMLError:
        return False


def _without_state(checkpoint: Path) -> str:
    weights = checkpoint / WEIGHTS
    if not weights.is_dir():
        return ""
    return f", begin a run from its weights (model.path={weights} with another trainer.output_dir)"


def _listed(keys: Iterable[str], config: TrainingConfig) -> str:
    return ", ".join(keys_to_allow(keys, config))


def _recipe(config: TrainingConfig) -> str:
    return type(config).__name__.removesuffix("Config")
