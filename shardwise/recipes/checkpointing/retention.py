"""Decides which checkpoints of a run stay, and removes the others."""

import difflib
import math
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from shardwise.config import ConfigError, KeepBestConfig, TrainerConfig
from shardwise.console import warn
from shardwise.fault_plan import fault_point
from shardwise.recipes.checkpointing.checkpoints import step_folders, write_latest
from shardwise.recipes.checkpointing.manifest import Manifest
from shardwise.recipes.checkpointing.publishing import staging_folder

_NUM_SHOWN = 5
"""How many metrics an error suggests for a misspelled one."""


class Reported:
    """The metrics that a run has reported, as far as they decide which checkpoint is the best."""

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}
        """The finite metrics of the last step."""
        self._names: set[str] = set()
        self._has_validated = False

    def add(self, metrics: Mapping[str, float], *, names: Collection[str], validates: bool) -> None:
        """Takes the metrics of one step. `names` also has metrics that were empty in this step; `validates` says that
        the step was due for validation."""
        self.newest = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._names = self._names | set(names)  # a new set: a save beside training may be reading the old one
        self._has_validated |= validates

    def require(self, metric: str) -> None:
        """Raises ConfigError: the run does not report the metric. Validation's (val/...) may be missing until the first
        validation."""
        if metric in self._names or not self._names or (metric.startswith("val/") and not self._has_validated):
            return
        nearest = difflib.get_close_matches(metric, self._names, n=_NUM_SHOWN, cutoff=0.0)
        likely = difflib.get_close_matches(metric, nearest, n=1)
        raise ConfigError(
            f"trainer.keep_best.metric={metric} is no metric of this run; "
            f"{f'did you mean {likely[0]}? ' if likely else ''}the nearest of its {len(self._names)} are "
            f"{', '.join(nearest)}. The checkpoint is saved, and the same command with another metric resumes from it"
        )


def after_saving(run: Path, step: int, trainer: TrainerConfig, reported: Reported) -> None:
    """Points `latest` at the new checkpoint and removes those that need not stay. An error of the file system is only a
    warning: the checkpoint is saved, and the next save tries again.

    Raises:
        ConfigError: the metric of trainer.keep_best is never reported; nothing is removed.
    """
    if trainer.keep_best is not None:
        reported.require(trainer.keep_best.metric)
    try:
        write_latest(run, step)
    except OSError as error:
        warn(f"{run} has no `latest` that names step {step}: {error}")
    try:
        remove_old(run, trainer)
    except OSError as error:
        warn(f"older checkpoints in {run} were not removed: {error}")


def remove_old(run: Path, trainer: TrainerConfig) -> None:
    """Removes the whole checkpoints of a run that the config does not keep. Raises OSError.

    Each is renamed first: a process that dies meanwhile leaves no half checkpoint, but what `remove_leftovers` removes.
    """
    folders = step_folders(run)
    found = {step: Manifest.find(folder) for step, folder in folders.items()}
    manifests = {step: manifest for step, manifest in found.items() if manifest is not None}
    for step in manifests.keys() - kept_steps(manifests, trainer):
        hidden = staging_folder(folders[step])
        os.replace(folders[step], hidden)
        fault_point("prune")
        shutil.rmtree(hidden)


def kept_steps(manifests: Mapping[int, Manifest], trainer: TrainerConfig) -> set[int]:
    """Returns the steps of whole checkpoints that stay. The newest always stays, and the newest finite one."""
    newest_first = sorted(manifests, reverse=True)
    if trainer.keep_last == 0:
        return set(newest_first)
    kept = set(newest_first[: trainer.keep_last])
    kept |= {step for step in newest_first if trainer.keep_every_steps and step % trainer.keep_every_steps == 0}
    kept |= set([step for step in newest_first if manifests[step].all_finite][:1])
    best = None if trainer.keep_best is None else best_step(manifests, trainer.keep_best)
    return kept if best is None else kept | {best}


def best_step(manifests: Mapping[int, Manifest], rule: KeepBestConfig) -> int | None:
    """Returns the earliest step whose metric is the best; None if no checkpoint has the metric."""
    values = {
        step: manifest.metrics[rule.metric] for step, manifest in manifests.items() if rule.metric in manifest.metrics
    }
    sign = -1 if rule.mode == "max" else 1
    return min(values, key=lambda step: (sign * values[step], step), default=None)
