"""Fingerprints of input files that checkpoints do not contain (models, training data), compared at resume."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import xxhash
from transformers.utils import ADAPTER_CONFIG_NAME

from shardwise.config import Config, ConfigError, LoraConfig, ModelConfig, ModelError, TrainingConfig, parts_of
from shardwise.engine import resolve_folder
from shardwise.engine.files.model_folder import PROCESSOR_FILES
from shardwise.engine.files.safetensors_file import SafetensorsReader
from shardwise.recipes.checkpointing.checkpoints import latest_hf_folder

Fingerprints = dict[str, list[list[str]]]
"""Config key -> [name, xxh3] of every file.

Example: `{"model.path": [["config.json", "5d41402abc4b2a76"], ["model.safetensors", "9c56cc51b374c3ba"]]}`
"""

_WEIGHTS = ".safetensors"
_CONFIGS = ("config.json", "generation_config.json")
_OLD_TEMPLATE = "chat_template.json"
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *(
        "chat_template.jinja",
        _OLD_TEMPLATE,
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
    ),
)
_BLOCK_BYTES = 1 << 20
"""Bytes that are read at once; also the size from which weights are hashed only in parts."""
_WHOLE = "whole:"
"""Prefix of the hash of a large file that was read to its end."""
_TENSOR_BYTES = 1 << 12
"""Bytes that are hashed at the beginning of a tensor, and in its middle."""


def fingerprints(config: TrainingConfig) -> Fingerprints:
    """Fingerprints every model and the training data, as far as they are on this machine.

    Weight files above 1 MiB are hashed at the beginning and in the middle of every tensor: this notices if any part of
    the model was trained, but maybe not if a few numbers were changed by hand. Other files are read whole.

    Raises:
        ConfigError: a file cannot be read. ModelError: one with weights is damaged.
    """
    files = [file for name in config.data.train_files for file in _rows(Path(name))]
    return model_fingerprints(config) | _digests({"data.train_files": files})


def model_fingerprints(config: Config) -> Fingerprints:
    """Fingerprints every model in a config, without data. Raises as `fingerprints`."""
    return _digests(dict(_model_files(config)))


def _digests(files: Mapping[str, Sequence[Path]]) -> Fingerprints:
    return {key: [[path.name, _digest(path, key)] for path in paths] for key, paths in files.items() if paths}


def changed_files(before: Mapping[str, Sequence[Sequence[str]]], now: Fingerprints) -> dict[str, str]:
    """Returns config key -> name of the first file that differs, without keys that have no files now. Files of
    processors, and a template as old folders have it, count only if there were some before: early checkpoints have
    none, for nothing read them."""
    changed = {}
    for key, files in before.items():
        if key not in now:
            continue
        known = {file[0]: file[1] for file in files}
        unknown = set(PROCESSOR_FILES) if known.keys().isdisjoint(PROCESSOR_FILES) else set()
        unknown |= {_OLD_TEMPLATE} - known.keys()
        found = [[name, _comparable(known.get(name), digest)] for name, digest in now[key] if name not in unknown]
        if files != found:
            either = (one for one in [*files, *found] if one not in files or one not in found)
            changed[key] = next(either, files[0])[0]
    return changed


def _comparable(before: str | None, now: str) -> str:
    """Returns the hash to compare with: the new one, if an early checkpoint hashed only parts of a large file."""
    return before if before is not None and now.startswith(_WHOLE) and not before.startswith(_WHOLE) else now


def require_base_of_adapter(lora: LoraConfig | None, model: ModelConfig, key: str) -> None:
    """Compares the weights of the model that an adapter was trained on with those of the model it is put on, as far as
    both are on this machine: other weights of the same shapes would accept it silently.

    Args:
        key: config key of the LoraConfig, for errors.
    Raises:
        ConfigError: the weights differ, or there is no adapter.
    """
    if lora is None or lora.adapter_path is None:
        return
    path = Path(lora.adapter_path) / ADAPTER_CONFIG_NAME
    if not path.is_file():
        raise ConfigError(
            f"{key}.adapter_path={lora.adapter_path} is no LoRA adapter: it has no {ADAPTER_CONFIG_NAME}; give the "
            "folder that peft's save_pretrained wrote, or adapter/ of a checkpoint"
        )
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        trained_on = str(stored["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # whoever loads it says what is wrong
    before, now = (
        {path.name: _digest(path, key) for path in _of_folder(_model_folder(name), (), weights=True)}
        for name in (trained_on, model.path)
    )
    if before and now and before != now:
        name = next(name for name in sorted({*before, *now}) if before.get(name) != now.get(name))
        raise ConfigError(
            f"{key}.adapter_path={lora.adapter_path} was trained on {trained_on}, whose weights are not those of "
            f"model.path={model.path} ({name}); set model.path to the model that it belongs to, or begin a new adapter"
        )


def _model_files(config: Config) -> Iterator[tuple[str, list[Path]]]:
    """Yields (config key of a path, its files), for every ModelConfig in a config."""
    for key, model in parts_of(config, ModelConfig):
        own_tokenizer = _TOKENIZER if model.tokenizer_path is None else ()
        yield (
            f"{key}.path",
            _of_folder(_model_folder(model.path), (*_CONFIGS, *PROCESSOR_FILES, *own_tokenizer), weights=True),
        )
        if model.tokenizer_path is not None:
            yield f"{key}.tokenizer_path", _of_folder(Path(model.tokenizer_path), _TOKENIZER, weights=False)
        if model.chat_template is not None and Path(model.chat_template).is_file():
            yield f"{key}.chat_template", [Path(model.chat_template)]


def _model_folder(path: str) -> Path | None:
    try:
        return resolve_folder(latest_hf_folder(path), may_download=False)
    except ModelError:
        return None  # whoever opens it says what is wrong


def _of_folder(folder: Path | None, names: Sequence[str], *, weights: bool) -> list[Path]:
    if folder is None or not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name in names or (weights and path.suffix == _WEIGHTS))


def _rows(path: Path) -> list[Path]:
    """Returns the file itself, or the files of a folder; of one that `datasets` wrote only those that belong to it."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    state = path / "state.json"
    if not state.is_file():
        return sorted(one for one in path.iterdir() if one.is_file())
    return [state, *(path / one["filename"] for one in json.loads(state.read_text())["_data_files"])]


def _digest(path: Path, key: str) -> str:
    digest = xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            for start, num_bytes in _parts(path):
                file.seek(start)
                digest.update(file.read(num_bytes))
            size = path.stat().st_size
            digest.update(str(size).encode())
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read ({error})") from None
    is_large = size > _BLOCK_BYTES and path.suffix != _WEIGHTS
    return f"{_WHOLE if is_large else ''}{digest.hexdigest()}"


def _parts(path: Path) -> Iterator[tuple[int, int]]:
    """Yields (offset, bytes) of the parts that are hashed."""
    size = path.stat().st_size
    if path.suffix != _WEIGHTS or size <= _BLOCK_BYTES:
        yield from ((start, min(size - start, _BLOCK_BYTES)) for start in range(0, size, _BLOCK_BYTES))
        return
    with closing(SafetensorsReader(path)) as reader:
        yield 0, len(reader.header)
        spans = reader.spans.values()
    for start, num_bytes in spans:
        yield start, min(num_bytes, _TENSOR_BYTES)
        yield start + num_bytes // 2, min(num_bytes - num_bytes // 2, _TENSOR_BYTES)
