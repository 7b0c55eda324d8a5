"""Checks before a byte of a checkpoint is written."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from shardwise.config import EngineConfig, ExportError, NotFiniteError, TrainerConfig
from shardwise.controller.base import WorkerGroup
from shardwise.engine import named_failures
from shardwise.recipes.checkpointing.checkpoints import step_folders
from shardwise.recipes.checkpointing.resume import STATE
from shardwise.recipes.engines import RemoteEngine


def check_before_saving(
    run: Path, engines: Iterable[RemoteEngine], trainer: TrainerConfig, holders: WorkerGroup
) -> None:
    """Checks that there is room for a checkpoint, and that all its numbers are finite.

    Args:
        holders: the group whose `nonfinite_tensors` checks on every rank what is to be saved of an engine.
    Raises:
        ExportError: there is no room for a checkpoint. NotFiniteError: it would hold NaN or infinities.
    """
    engines = list(engines)
    with named_failures(run):
        _require_room(run, engines, trainer)
    _require_finite(engines, holders)


def _require_room(run: Path, engines: list[RemoteEngine], trainer: TrainerConfig) -> None:
    needed = _bytes_of_previous(run, with_state=trainer.save_state)
    if needed is None:
        needed = sum(_num_bytes(engine, with_state=trainer.save_state) for engine in engines)
    free = shutil.disk_usage(run).free
    if free < needed:
        raise ExportError(
            f"a checkpoint in {run} takes about {needed} bytes, and {free} are free there; free some, or let "
            "trainer.keep_last remove older checkpoints"
        )


def _bytes_of_previous(run: Path, *, with_state: bool) -> int | None:
    """Returns the size of the newest checkpoint of this kind in the folder; None if there is none."""
    alike = (folder for folder in step_folders(run).values() if (folder / STATE).is_dir() == with_state)
    previous = next(alike, None)
    return None if previous is None else sum(path.stat().st_size for path in previous.rglob("*") if path.is_file())


def _num_bytes(engine: RemoteEngine, *, with_state: bool) -> int:
    """Returns a lower bound of the bytes that are saved; for a state the masters and one moment, as Muon has."""
    layout = engine.source.layout
    assert isinstance(layout, EngineConfig), f"{engine.role} is not trained"
    param_bytes, master_bytes = (getattr(torch, dtype).itemsize for dtype in (layout.param_dtype, layout.master_dtype))
    saves_whole = layout.lora is None or layout.lora.save_merged
    weights = param_bytes * (engine.num_parameters if saves_whole else engine.num_trained_parameters)
    return weights + (engine.num_trained_parameters * 2 * master_bytes if with_state else 0)


def _require_finite(engines: list[RemoteEngine], holders: WorkerGroup) -> None:
    for engine in engines:
        names = [name for of_rank in holders.call("nonfinite_tensors", engine.role) for name in of_rank]
        if names:
            others = f" and {len(set(names)) - 1} more tensors" if len(set(names)) > 1 else ""
            raise NotFiniteError(
                f"{names[0]}{others} of the {engine.role} hold NaN or infinities, so no checkpoint is made of them; go "
                "on from the last one with a lower learning rate, or look at the data of the steps after it"
            )
