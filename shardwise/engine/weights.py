"""Weights between safetensors files and shards: every rank reads its own slices; exports go tensor by tensor."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, apply_renamings

from shardwise.config import ModelError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_FILE_BYTES = 5 * 2**30


def resolve_folder(path: str) -> Path:
    """The local folder of a model; a hub name is downloaded (or found in the cache) first.

    Raises:
        ModelError: no such folder, no such hub model, or a folder without config.json or safetensors files.
    """
    folder = Path(path)
    if not folder.is_dir():
        if folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise ModelError(f"model.path={path} is not a folder; give a Hugging Face model folder or a hub name")
        try:
            patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
            folder = Path(snapshot_download(path, allow_patterns=patterns))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise ModelError(
                f"model.path={path} is neither a local folder nor a model that the hub or its cache could give "
                f"({type(error).__name__}); check the name, or the connection"
            ) from None
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path={path}: {folder / 'config.json'} does not exist; a model folder needs one")
    if not list(folder.glob("*.safetensors")):
        raise ModelError(
            f"model.path={path} has a config.json but no *.safetensors weights; save the model with save_pretrained, "
            "or convert other formats to safetensors"
        )
    return folder


class SafetensorsFolder:
    """Random access to the tensors of a model folder, one file or many."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._file_of = self._read_index()
            self._handles = {name: safe_open(folder / name, "pt") for name in sorted(set(self._file_of.values()))}
            self._check_index()
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{folder}: the weights cannot be read: {error}") from None

    def _read_index(self) -> dict[str, str]:
        if not (self.folder / INDEX_NAME).is_file():
            files = sorted(path.name for path in self.folder.glob("*.safetensors"))
            return {name: file for file in files for name in safe_open(self.folder / file, "pt").keys()}  # noqa: SIM118
        index = json.loads((self.folder / INDEX_NAME).read_text())
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict):
            raise ValueError(f"{INDEX_NAME} has no weight_map from tensor names to files")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{INDEX_NAME} puts {name} into {file!r}, which is not the name of a file beside it")
        return weight_map

    def _check_index(self) -> None:
        held = {file: set(handle.keys()) for file, handle in self._handles.items()}
        for name, file in self._file_of.items():
            if name not in held[file]:
                raise ValueError(f"{INDEX_NAME} puts {name} into {file}, which does not hold it")

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of dim 0; nothing else is read from disk. A scalar is read whole."""
        view = self._slice(name)
        return view[start:stop] if view.get_shape() else view[...]

    def _slice(self, name: str) -> Any:
        return self._handles[self._file_of[name]].get_slice(name)


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: Path) -> int:
    """Fills every parameter and persistent buffer of a materialized (sharded or whole) model, cast to its dtype.

    Returns:
        The bytes this rank read.
    Raises:
        ModelError: a tensor is missing, left over or of another shape; lists them.
    """
    conversions = get_model_conversion_mapping(model)
    if any(isinstance(conversion, WeightConverter) for conversion in conversions):
        raise ModelError(
            f"{model.config.model_type} stores its weights in another form than it computes with (fused experts); "
            "this version loads families whose checkpoints need no conversion"
        )
    source = SafetensorsFolder(folder)
    target = model.state_dict()
    tied = set(model.get_expanded_tied_weights_keys())
    stored = {name: old for old, name in _renamed(source.names(), conversions).items()}
    wanted = {name: _name_in_checkpoint(name, stored, model) for name in target if name not in tied}
    _check_names(model, folder, source, target, wanted, tied)
    num_bytes = 0
    for name, stored_name in wanted.items():
        tensor = target[name]
        start = 0
        local = tensor
        if isinstance(tensor, DTensor):
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            local, start = tensor.to_local(), offset[0] if offset else 0
        if local.numel() == 0:  # dim 0 has fewer rows than there are ranks
            continue
        rows = source.read(stored_name, start, start + (local.shape[0] if local.dim() else 1))
        local.copy_(rows)
        num_bytes += rows.nbytes
    return num_bytes


def _renamed(names: Iterable[str], renamings: Sequence[WeightRenaming]) -> dict[str, str]:
    """Old name -> new name. Sorted, because grouped renamings of transformers start with the first of their names."""
    return {name: apply_renamings(name, renamings) for name in sorted(names)}


def _name_in_checkpoint(name: str, stored: dict[str, str], model: PreTrainedModel) -> str:
    """`stored` maps the model's names to those in the files; a bare backbone's leave the backbone's prefix out."""
    bare = name.removeprefix(f"{model.base_model_prefix}.")
    return stored.get(name, stored.get(bare, name))


def _exported_names(model: PreTrainedModel) -> dict[str, str]:
    """Name in the model -> name in files, as save_pretrained writes them (Pythia's lm_head is embed_out there)."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming) and not isinstance(c, PrefixChange)]
    return _renamed(model.state_dict(), [renaming.reverse_transform() for renaming in reversed(renamings)])


def _check_names(
    model: PreTrainedModel,
    folder: Path,
    source: SafetensorsFolder,
    target: dict[str, Tensor],
    wanted: dict[str, str],
    tied: set[str],
) -> None:
    stored = source.names()
    missing = sorted(name for name, stored_name in wanted.items() if stored_name not in stored)
    wrong = [
        f"{name} is {list(source.shape(at))}, expected {list(target[name].shape)}"
        for name, at in wanted.items()
        if at in stored and source.shape(at) != tuple(target[name].shape)
    ]
    buffers = {name for name, _ in model.named_buffers()}
    extra = sorted(stored - set(wanted.values()) - tied - buffers)
    extra = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]
    problems = []
    for label, names in (("missing", missing), ("of the wrong shape", wrong), ("not part of the model", extra)):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            problems.append(f"{len(names)} tensors are {label} ({shown})")
    if problems:
        raise ModelError(f"{folder} does not fit its config.json ({type(model).__name__}): {'; '.join(problems)}")


@torch.no_grad()
def full_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Collective. Yields (Hugging Face name, full tensor), one at a time, tied copies left out.

    The shard is cast before it is gathered: half the bytes for bfloat16. The peak is the largest tensor.
    """
    tied = set(model.get_expanded_tied_weights_keys())
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
        yield name, cast.full_tensor() if isinstance(cast, DTensor) else cast


def export_folder(model: PreTrainedModel, tokenizer: Any, path: Path, dtype: torch.dtype) -> None:
    """Collective. Writes a folder that `from_pretrained` loads as it is: config, tokenizer, generation config, weights.

    Rank 0 writes to a temporary name and renames it when everything is on disk, so `path` is whole or absent.
    """
    rank = dist.get_rank()
    staging = path.with_name(f".{path.name}.partial")
    if rank == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        config = model.config.__class__.from_dict(
            {**model.config.to_dict(), "dtype": str(dtype).removeprefix("torch.")}
        )
        config.architectures = [type(model).__name__]
        config.save_pretrained(staging)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    writer = _ShardWriter(staging) if rank == 0 else None
    exported = _exported_names(model)
    for name, tensor in full_weights(model, dtype):
        if writer is not None:
            writer.add(exported[name], tensor)
    if writer is not None:
        writer.finish()
        shutil.rmtree(path, ignore_errors=True)
        os.replace(staging, path)
    dist.barrier()


class _ShardWriter:
    """Collects tensors into files of at most MAX_FILE_BYTES, in save_pretrained's layout and names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._files: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > MAX_FILE_BYTES:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def _flush(self) -> None:
        path = self._folder / f"part-{len(self._files):05d}"
        save_file(self._pending, path, metadata={"format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self._files.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def finish(self) -> None:
        self._flush()
        count = len(self._files)
        weight_map = {}
        for index, names in enumerate(self._files):
            final = SINGLE_NAME if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / f"part-{index:05d}").rename(self._folder / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index_tree = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._folder / INDEX_NAME).write_text(json.dumps(index_tree, indent=2))


def num_parameters(model: nn.Module) -> int:
    """Of the whole model, shared weights counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
