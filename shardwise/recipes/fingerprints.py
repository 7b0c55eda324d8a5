"""By what a run knows the files again that it reads and does not keep: its models and its training data."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from shardwise.config import ModelConfig, ModelError, TrainingConfig
from shardwise.engine import resolve_folder
from shardwise.recipes.checkpoints import latest_hf_folder

MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt")
"""Of a model folder: weights, configs, tokenizer."""
_NUM_BLOCKS, _BLOCK_BYTES = 16, 1 << 16


def fingerprints(config: TrainingConfig) -> dict[str, str]:
    """By config key, of every model and of the training data, as far as they are on this machine.

    Of large files the size and 16 blocks spread over them are looked at: another model, or one that was trained on, is
    noticed at once; a few numbers changed by hand may not be.

    Example: `{"model.path": "5d41402abc4b2a76", "data.train_files": "9c56cc51b374c3ba"}`
    """
    data = [path for name in config.data.train_files for path in _within(Path(name))]
    files = {**dict(_model_files(config)), "data.train_files": data}
    return {key: _of(paths) for key, paths in files.items() if paths}


def _model_files(config: Any, key: str = "") -> Iterator[tuple[str, list[Path]]]:
    """Of every ModelConfig in a config, by the keys of its paths."""
    if isinstance(config, ModelConfig):
        yield f"{key}.path", _files_of_model(config.path)
        for name, path in (("tokenizer_path", config.tokenizer_path), ("chat_template", config.chat_template)):
            yield f"{key}.{name}", [] if path is None else _within(Path(path))
    elif isinstance(config, list):
        for place, one in enumerate(config):
            yield from _model_files(one, f"{key}.{place}")
    else:
        for name in getattr(type(config), "model_fields", ()):
            yield from _model_files(getattr(config, name), f"{key}.{name}" if key else name)


def _files_of_model(path: str) -> list[Path]:
    try:
        folder = resolve_folder(latest_hf_folder(path), may_download=False)
    except ModelError:
        return []  # whoever opens it says what is wrong
    return [file for file in _within(folder) if file.suffix in MODEL_FILES]


def _within(path: Path) -> list[Path]:
    """The file itself, or the files of a folder that are no hidden ones; none where there is neither."""
    if path.is_dir():
        return sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
    return [path] if path.is_file() else []


def _of(files: Iterable[Path]) -> str:
    digest = xxhash.xxh3_64()
    for path in files:
        num_bytes = path.stat().st_size
        digest.update(f"{path.name}:{num_bytes}\n".encode())
        with path.open("rb") as file:
            if num_bytes <= _NUM_BLOCKS * _BLOCK_BYTES:
                digest.update(file.read())
                continue
            for block in range(_NUM_BLOCKS):
                file.seek(block * (num_bytes - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
