"""Publishes checkpoints whole or not at all."""

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
"""Subfolder of a run's output folder for bundles of skipped steps."""


@contextmanager
def new_checkpoint(run: Path, step: int) -> Iterator[Path]:
    """Yields a folder under a temporary name, which nothing takes for a checkpoint. When the body is done, all of it is
    made durable and the folder gets its final name; a process that dies earlier leaves no checkpoint.

    Raises:
        ExportError: a file could not be written; nothing of the checkpoint is left.
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
            move_aside(final)  # an incomplete one, or the run would have resumed from it
            fault_point("commit")
            os.replace(staging, final)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    with _only_told(final):
        fault_point("commit")
    make_name_durable(final)


def make_name_durable(final: Path) -> None:
    """Makes the name of a finished checkpoint or bundle durable. A failure is only a warning: another attempt to write
    it would move the finished one aside."""
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
    """Removes checkpoints and bundles that a dead process left half written or half removed."""
    for folder in (run / CHECKPOINTS).glob(staging_folder(run / "step_*").name):
        shutil.rmtree(folder)
    shutil.rmtree(unfinished_bundle(run / NONFINITE), ignore_errors=True)


def unfinished_bundle(folder: Path) -> Path:
    """Returns where a bundle of `folder` is while it is being written."""
    return folder / ".bundle.tmp"


def staging_folder(final: Path) -> Path:
    """Returns where a checkpoint is while it is being written or removed."""
    return final.with_name(f".{final.name}.tmp")
