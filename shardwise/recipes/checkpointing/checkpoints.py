"""Finds the checkpoints of a run, and the weights in them."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shardwise.config import ModelError
from shardwise.durable import replacing
from shardwise.observability import METRICS

CHECKPOINTS = "checkpoints"
"""Subfolder of a run's output folder."""
LATEST = "latest"
"""File in CHECKPOINTS that names the newest, for people and scripts. Nothing here reads it: folder names suffice."""
WEIGHTS = "hf"
"""Subfolder of a checkpoint that Hugging Face loads."""
ADAPTER = "adapter"
"""Subfolder of a checkpoint that peft loads."""

_STEP = re.compile(r"step_(\d+)")
"""The name of a checkpoint's folder."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """checkpoints/step_N of a run: the whole model, its adapters, or both."""

    folder: Path
    hf: Path | None
    adapter: Path | None

    @classmethod
    def at(cls, folder: Path) -> Self:
        """Looks at what is in the folder."""
        hf, adapter = folder / WEIGHTS, folder / ADAPTER
        return cls(folder, hf if hf.is_dir() else None, adapter if adapter.is_dir() else None)


def latest_checkpoint(path: str) -> Checkpoint | None:
    """Returns the newest checkpoint with weights of a run's output folder, or the checkpoint that `path` itself is;
    None if it is neither or there are no weights."""
    folder = Path(path)
    found = [Checkpoint.at(one) for one in step_folders(folder).values()]
    if is_checkpoint(folder):
        found.append(Checkpoint.at(folder))
    return next((checkpoint for checkpoint in found if checkpoint.hf or checkpoint.adapter), None)


def is_checkpoint(folder: Path) -> bool:
    """Returns whether the folder is named like a checkpoint, and is no model itself."""
    return bool(_STEP.fullmatch(Path(os.path.abspath(folder)).name)) and not (folder / "config.json").is_file()


def checkpoint_of(weights: Path) -> Path | None:
    """Returns the checkpoint of a run that contains this hf/, adapter/, critic/hf/ or the like; None elsewhere."""
    within = weights.resolve()
    if within.name not in (WEIGHTS, ADAPTER):
        return None
    return next((one for one in within.parents if one.parent.name == CHECKPOINTS and is_checkpoint(one)), None)


@contextmanager
def reading(weights: Path) -> Iterator[None]:
    """Wraps code that reads a folder of weights, which a run in progress may remove meanwhile.

    Raises:
        ModelError: the run removed it; replaces the error that this led to.
    """
    checkpoint = checkpoint_of(weights) if weights.is_dir() else None
    try:
        yield
    except Exception:  # libraries say in many ways that a file is not there
        if checkpoint is None or weights.is_dir():
            raise
        raise ModelError(
            f"{weights} was removed while it was read: a run goes on there and keeps fewer checkpoints "
            f"(trainer.keep_last); start again with {checkpoint.parent.parent}, of which the newest is read"
        ) from None


def step_folders(run: Path) -> dict[int, Path]:
    """Returns step -> checkpoint folder, for a run's output folder, the newest first."""
    folders = (run / CHECKPOINTS).glob("step_*")
    steps = {int(match[1]): path for path in folders if (match := _STEP.fullmatch(path.name))}
    return dict(sorted(steps.items(), reverse=True))


def newest_mark(run: Path) -> tuple[str, int] | None:
    """Returns the newest checkpoint's path and mtime in ns, which tells it from an earlier one of the same step."""
    newest = next(iter(step_folders(run).values()), None)
    return None if newest is None else (str(newest), newest.stat().st_mtime_ns)


def step_folder(run: Path, step: int) -> Path:
    """Returns where the checkpoint of a step is."""
    return run / CHECKPOINTS / f"step_{step}"


def write_latest(run: Path, step: int) -> None:
    """Writes the name of a step's checkpoint into `checkpoints/latest`, whole or not at all. Raises OSError."""
    with replacing(run / CHECKPOINTS / LATEST) as file:
        file.write(f"{step_folder(run, step).name}\n")


def _refuse_runs_without_weights(folder: Path) -> None:
    """Raises ModelError: the folder is that of a run, lies in it or holds runs, and has no weights itself."""
    if (folder / "config.json").is_file():
        return
    if (folder / CHECKPOINTS).is_dir() or (folder / METRICS).is_file():
        raise ModelError(
            f"{folder} is a run that has saved no checkpoint yet; wait for the first (trainer.save_every_steps), or "
            "name another"
        )
    if folder.name == CHECKPOINTS and folder.is_dir():
        raise ModelError(f"{folder} holds the checkpoints of a run; name the run, {folder.parent}, or one of them")
    runs = sorted(path.parent.parent for path in folder.glob(f"*/{CHECKPOINTS}/step_*"))
    if runs:
        raise ModelError(f"{folder} holds runs; name one, such as {runs[0]}")


def latest_hf_folder(path: str) -> str:
    """Returns the `hf/` folder of the newest checkpoint if `path` is a run's output folder, of the checkpoint if it is
    one; else `path` itself.

    Raises:
        ModelError: the checkpoint holds only an adapter, or the run has no checkpoint yet.
    """
    checkpoint = latest_checkpoint(path)
    if checkpoint is None:
        _refuse_runs_without_weights(Path(path))
        return path
    if checkpoint.hf is None:
        raise ModelError(
            f"{checkpoint.folder} holds an adapter and no whole model (engine.lora.save_merged=false); merge them with "
            f"`shardwise export {path} TARGET` and use TARGET"
        )
    return str(checkpoint.hf)
