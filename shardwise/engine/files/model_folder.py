"""A model's folder on disk: where it is, and its tensors, in one file or in many."""

import json
import os
import shutil
from pathlib import Path
from typing import Self

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.config import ModelError
from shardwise.engine.files.safetensors_file import Box, SafetensorsReader, TensorSpec
from shardwise.model_config import read_generation_config

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_LONGEST_NAME = 255
"""Most bytes that file systems take for the name of a file."""


def resolve_folder(path: str, *, may_download: bool = True) -> Path:
    """Returns the local folder of a model; a hub name is downloaded (or found in the cache) first.

    Raises:
        ModelError: no such folder, no such hub model, or a folder without config.json or safetensors files, or with a
            damaged index of them.
    """
    folder = Path(path)
    if not folder.is_dir():
        if folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise ModelError(f"{path} is not a folder; give a Hugging Face model folder or a hub name")
        try:
            folder = _downloaded(path, may_download=may_download)
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise ModelError(
                f"{path} is neither a local folder nor a model that the hub or its cache could give "
                f"({type(error).__name__}); check the name, or the connection"
            ) from None
    if not (folder / "config.json").is_file():
        raise ModelError(f"{path}: {folder / 'config.json'} does not exist; a model folder needs one")
    if not list(folder.glob("*.safetensors")):
        raise ModelError(
            f"{path} has a config.json but no *.safetensors weights; save the model with save_pretrained, "
            "or convert other formats to safetensors"
        )
    _read_index(folder)
    return folder


def _downloaded(name: str, *, may_download: bool) -> Path:
    """Downloads only what is read of a hub model: many hold their weights a second time, in another form."""

    def fetch(*patterns: str, revision: str | None = None) -> Path:
        asked = list(patterns)
        return Path(snapshot_download(name, revision=revision, allow_patterns=asked, local_files_only=not may_download))

    folder = fetch("*.json", "*.jinja", "*.model", "*.txt")
    commit = folder.name
    if not (fetch(SINGLE_NAME, revision=commit) / SINGLE_NAME).is_file():
        index = _read_index(folder)
        fetch(*(["*.safetensors"] if index is None else set(index.values())), revision=commit)
    return folder


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name; None for a folder without an index, or with a single file, which takes precedence as in
    transformers. Raises ModelError: the index is damaged."""
    if (folder / SINGLE_NAME).is_file() or not (folder / INDEX_NAME).is_file():
        return None
    try:
        index = json.loads((folder / INDEX_NAME).read_text())
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict):
            raise ValueError("it has no weight_map from tensor names to files")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or len(os.fsencode(file)) > _LONGEST_NAME:
                raise ValueError(f"it puts {name} into {file!r}, which is not the name of a file beside it")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{folder}: {INDEX_NAME} cannot be used: {error}; download or copy it again") from None
    return weight_map


class ModelFolder:
    """The tensors of a model folder, of which slices can be read. A context manager.

    They are in model.safetensors; without it in the files that the index names; without that in all safetensors files.
    What lies beside them (an adapter, the weights in another form) is not read.
    """

    def __init__(self, folder: Path, *, require_finite: bool = False) -> None:
        """
        Args:
            require_finite: whether reading NaN or an infinity is an error.
        Raises:
            ModelError: a file or the index is damaged or missing, or without an index two files hold a tensor of the
                same name; names it.
        """
        self.folder = folder
        self._require_finite = require_finite
        self._readers: dict[str, SafetensorsReader] = {}
        self._file_of: dict[str, str] = {}
        self.specs: dict[str, TensorSpec] = {}
        """Dtype and shape of each tensor."""
        try:
            self._open()
        except ModelError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def read(self, name: str, box: Box | None = None, *, may_be_infinite: bool = False) -> Tensor:
        """Reads a tensor, or the part of it inside `box`, to the host; nothing else is read from disk.

        Args:
            may_be_infinite: see SafetensorsReader.read.
        Raises:
            ModelError: it cannot be read, or has to be finite and is not.
        """
        whole = [slice(0, size) for size in self.specs[name].shape]
        reader = self._readers[self._file_of[name]]
        return reader.read(name, whole if box is None else box, may_be_infinite=may_be_infinite)

    def _open(self) -> None:
        index = _read_index(self.folder)
        for file in self._files(index):
            reader = self._readers[file] = SafetensorsReader(self.folder / file, require_finite=self._require_finite)
            for name, spec in reader.specs.items():
                if index is not None and index.get(name) != file:
                    continue
                if name in self.specs:
                    raise ModelError(
                        f"{self.folder}: {name} is in {self._file_of[name]} and in {file}, and without "
                        f"{INDEX_NAME} nothing says which one counts; move the file that is not the model elsewhere"
                    )
                self._file_of[name], self.specs[name] = file, spec
        for name, file in (index or {}).items():
            if name not in self.specs:
                raise ModelError(
                    f"{self.folder}: {INDEX_NAME} puts {name} into {file}, which does not hold it; "
                    "download or copy both again"
                )

    def _files(self, index: dict[str, str] | None) -> list[str]:
        """The names of the files that are read. Raises ModelError: one that the index names does not exist."""
        for name, file in (index or {}).items():
            if not (self.folder / file).is_file():
                raise ModelError(
                    f"{self.folder}: {INDEX_NAME} cannot be used: it puts {name} into {file}, which does not exist; "
                    "download or copy it again"
                )
        if index is not None:
            return sorted(set(index.values()))
        if (self.folder / SINGLE_NAME).is_file():
            return [SINGLE_NAME]
        return sorted(path.name for path in self.folder.glob("*.safetensors"))


PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files that say how images are prepared for a model, beside what its tokenizer saves."""


def copy_processor_files(source: Path, target: Path) -> None:
    """Copies those of PROCESSOR_FILES that a model's folder has. Raises OSError."""
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def take_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Gives a model that is built from its config the generation config beside it, so that exports keep it. Raises
    ModelError: it cannot be used."""
    if (config := read_generation_config(folder)) is not None:
        model.generation_config = config
