"""Exports a model as a Hugging Face folder: in another dtype, or with an adapter merged into it."""

import json
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import ADAPTER_CONFIG_NAME

from shardwise.config import ConfigError, ModelConfig, ModelError
from shardwise.console import counted
from shardwise.controller.base import WorkerGroup
from shardwise.model_config import read_model_config
from shardwise.recipes.checkpointing.checkpoints import latest_checkpoint, reading
from shardwise.recipes.checkpointing.manifest import verify_weights
from shardwise.recipes.opened_model import OpenedModel, open_model


def export(source: str, target: str, group: WorkerGroup, *, dtype: str | None, max_shard_size: str) -> None:
    """Exports a model. Runs on rank 0; every rank loads and writes its part.

    Args:
        source: a run's output folder (its newest checkpoint), a model folder, a hub name, or an adapter folder, which
            is merged into the base model that it names.
        target: a folder that does not exist yet, or an empty one.
        dtype: dtype of the written weights; None keeps the one that the source's config.json names.
        max_shard_size: largest size of a weight file, such as "5GB".
    Raises:
        ConfigError: target is not empty or its path does not end in a name, or no dtype is known. ModelError: source
            cannot be loaded, or its weights are not those that a run wrote there.
        ExportError: target cannot be written.
    """
    folder = new_folder(target)
    opened = _open(source)
    adapter = "" if opened.adapter is None else str(opened.adapter)
    with reading(opened.model.folder), reading(opened.adapter or opened.model.folder):
        dtype = dtype if dtype is not None else named_dtype(opened.model.folder)
        group.call("export_model", opened.model.config.model_dump_json(), adapter, str(folder), dtype, max_shard_size)
    print(written(Path(target), dtype), flush=True)


def new_folder(target: str) -> Path:
    """Returns where to write a new folder `target`: the path it links to, if it is a link.

    What is at the path is replaced at the end by the folder that was written.

    Raises:
        ConfigError: the path does not end in a name, the folder is not empty, or it cannot be replaced because a file
            system is mounted there.
    """
    if Path(target).name in ("", ".."):
        raise ConfigError(
            f"{target} does not end in the name of a folder; give one, such as {Path(target, 'exported')}"
        )
    require_empty(target)
    folder = Path(target).resolve() if Path(target).is_symlink() else Path(target)
    if folder.is_mount():
        raise ConfigError(
            f"{target} is where a file system is mounted, and the folder that is written takes the place of what is "
            f"there; name one in it, such as {Path(target, 'exported')}"
        )
    return folder


def require_empty(target: str) -> None:
    """Raises ConfigError: there is something at the path that is not an empty folder."""
    folder = Path(target)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{target} is not an empty folder; name a new one, or remove what is there")


def written(folder: Path, dtype: str) -> str:
    """Says in words what a model folder holds."""
    files = list(folder.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    return f"{folder}: {dtype}, {num_bytes / 2**20:,.1f} MiB in {counted(len(files), 'file')}"


@dataclass(frozen=True, slots=True)
class _Source:
    model: OpenedModel
    adapter: Path | None


def _open(source: str) -> _Source:
    checkpoint = latest_checkpoint(source)
    if checkpoint is not None and checkpoint.hf is None:
        adapter = checkpoint.adapter
    else:
        adapter = Path(source) if (Path(source) / ADAPTER_CONFIG_NAME).is_file() else None
    if adapter is None:
        return _Source(open_model(ModelConfig(path=source)), None)
    with reading(adapter):
        model = open_model(ModelConfig(path=_base_of(adapter)))
        verify_weights(adapter)
        return _Source(model, adapter)


def _base_of(adapter: Path) -> str:
    """Returns the base model that an adapter names. Raises ModelError: it names none, or its config is damaged."""
    path = adapter / ADAPTER_CONFIG_NAME
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; copy the adapter again") from None
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(base, str) or not base:
        raise ModelError(f"{path} does not say in base_model_name_or_path which model it adapts")
    return base


def named_dtype(folder: Path) -> str:
    """Returns the dtype of the weights that config.json names. Raises ConfigError: it names none."""
    dtype = read_model_config(folder).dtype
    if dtype is None:
        raise ConfigError(f"{folder / 'config.json'} names no dtype; choose one with --dtype, such as bfloat16")
    return str(dtype).removeprefix("torch.")
