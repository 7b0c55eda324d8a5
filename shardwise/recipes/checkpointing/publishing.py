"""Checkpoints that are there as a whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.console import warn
from shardwise.durable import fsync_folder, fsync_path
from shardwise.engine import named_failures
from shardwise.fault_plan import fault_point
from shardwise.observability import move_aside
from shardwise.recipes.checkpointing.checkpoints import CHECKPOINTS, step_folder

NONFINITE = "nonfinite"
"""In a run's output folder: bundles of steps that were skipped."""


@contextmanager
def new_checkpoint(run: Path, step: int) -> Iterator[Path]:
    """Yields a folder under a name that nobody takes for a checkpoint. When the body is done, all of it is made durable
    and it gets its own name; a process that dies before leaves no checkpoint.

    Raises:
        ExportError: what the body wrote could not be kept; nothing of it is left.
    """
    final = step_folder(run, step)
    staging = staging_folder(final)
    with named_failures(final):
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            yield staging
            for folder in (staging, *(path for path in staging.rglob("*") if path.is_dir())):
                fsync_folder(folder)
            move_aside(final)  # one that is not whole, or it would have been resumed from
            fault_point("commit")
            os.replace(staging, final)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    with _only_told(final):
        fault_point("commit")
    make_name_durable(final)


def make_name_durable(final: Path) -> None:
    """Of something that is whole and has its name, in a folder of a run: to write it once more would move it aside, so
    what goes wrong is told and no more."""
    with _only_told(final):
        fsync_path(final.parent)
        fsync_path(final.parent.parent)


@contextmanager
def _only_told(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        warn(f"{final} is saved, but may not survive a power cut: {error}")


def remove_leftovers(run: Path) -> None:
    """Removes what a process that died left half written, or half removed."""
    for folder in (run / CHECKPOINTS).glob(staging_folder(run / "step_*").name):
        shutil.rmtree(folder)
    shutil.rmtree(unfinished_bundle(run / NONFINITE), ignore_errors=True)


def unfinished_bundle(folder: Path) -> Path:
    """Where a bundle of `folder` is while it is being written."""
    return folder / ".bundle.tmp"


def staging_folder(final: Path) -> Path:
    """Where a checkpoint is while it is being written, or removed."""
    return final.with_name(f".{final.name}.tmp")
