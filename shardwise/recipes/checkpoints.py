"""Finds the weights that a run left."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shardwise.config import ModelError

ADAPTER_CONFIG = "adapter_config.json"
"""What makes a folder one that holds an adapter."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """checkpoints/step_N of a run: the whole model, its adapters, or both."""

    folder: Path
    hf: Path | None
    adapter: Path | None

    @classmethod
    def at(cls, folder: Path) -> Self:
        """What is in the folder."""
        hf, adapter = folder / "hf", folder / "adapter"
        return cls(folder, hf if hf.is_dir() else None, adapter if adapter.is_dir() else None)


def latest_checkpoint(path: str) -> Checkpoint | None:
    """The newest of a run's output folder that holds weights; None if `path` is none or has none."""
    steps = {
        int(match[1]): checkpoint
        for folder in Path(path).glob("checkpoints/step_*")
        if (match := re.fullmatch(r"step_(\d+)", folder.name))
        and ((checkpoint := Checkpoint.at(folder)).hf or checkpoint.adapter)
    }
    return steps[max(steps)] if steps else None


def latest_hf_folder(path: str) -> str:
    """The `hf/` folder of the newest checkpoint if `path` is a run's output folder; else `path` itself.

    Raises:
        ModelError: that checkpoint holds an adapter only.
    """
    checkpoint = latest_checkpoint(path)
    if checkpoint is None:
        return path
    if checkpoint.hf is None:
        raise ModelError(
            f"{checkpoint.folder} holds an adapter and no whole model (engine.lora.save_merged=false); merge them with "
            f"`shardwise export {path} TARGET` and use TARGET"
        )
    return str(checkpoint.hf)
