"""Writes a sharded model as a Hugging Face folder, block by block: no rank ever holds more than one block of it."""

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from shardwise.config import ExportError
from shardwise.durable import fsync_folder
from shardwise.engine.agreement import written_on_every_rank
from shardwise.engine.files.conversions import ExportBlock, export_blocks
from shardwise.engine.files.model_folder import INDEX_NAME, copy_processor_files
from shardwise.engine.files.safetensors_file import SafetensorsWriter, TensorSpec
from shardwise.engine.files.staging import HostShards, StagingBuffers
from shardwise.engine.gathering import gathered_blocks
from shardwise.engine.model_classes import CODE_NAME, auto_map, class_code
from shardwise.engine.runtime_state import buffer_names, has_adapters, merged_state, runtime_state
from shardwise.ops import nonfinite_names
from shardwise.types import Connections

MAX_SHARD_SIZE = "50GB"
"""The default of save_pretrained in transformers 5."""


@torch.no_grad()
def export_folder(
    model: PreTrainedModel,
    tokenizer: Any,
    path: Path,
    dtype: torch.dtype,
    *,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Collective. Writes a folder that `from_pretrained` loads as it is: config, tokenizer, generation config, weights.

    The files are those of `save_pretrained`, byte for byte. They are dealt out to the ranks, which write in parallel;
    only the rank that writes a tensor copies it to the host. Everything goes to a temporary name that rank 0 renames
    when all of it is on disk, so `path` is whole or absent. The peak on a rank is the largest block (one tensor, or the
    experts of one layer) and its parts.

    A classifier whose config names no padding token gets the tokenizer's, unless that ends sequences too: transformers
    would then score another token than was trained.

    Args:
        path: on a file system that all ranks see; what is there is replaced.
        max_shard_size: bytes of a weight file, or "5GB"; a larger tensor has a file of its own.
        weights: instead of those of the model, which may then be on the meta device: runtime name -> whole tensor,
            each asked for once, when its block is written, and checked for NaN and infinities.
    Raises:
        ExportError: on every rank, if a rank could not write; names it and the cause; or `weights` are not finite in
            the file's dtype.
    """
    staging = path.with_name(f".{path.name}.partial")
    plan = ExportPlan.of(model, dtype, max_shard_size=max_shard_size)
    try:
        with written_on_every_rank(staging):
            if dist.get_rank() == 0:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
                plan.write_configs(staging, tokenizer)
        writers = plan.writers(staging)
        merged = merged_state(model) if weights is None else weights
        for block, wholes in gathered_blocks(merged, plan.blocks):
            if weights is not None:
                require_finite(dict(zip(block.runtime_names, wholes, strict=True)), buffers=buffer_names(model))
            writers.write(block, wholes)
        with written_on_every_rank(staging):
            writers.finish()
        with written_on_every_rank(path):
            if dist.get_rank() == 0:
                plan.finish(staging)
                shutil.rmtree(path, ignore_errors=True)
                os.replace(staging, path)
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def require_finite(tensors: Mapping[str, Tensor], *, buffers: Collection[str] = ()) -> None:
    """Raises ExportError: in the dtype that it is to be written in, a tensor holds NaN, or an infinity and is no
    buffer."""
    if names := nonfinite_names(tensors.items(), may_be_infinite=buffers):
        dtype = tensors[names[0]].dtype
        remedy = "use --dtype bfloat16 or float32" if dtype == torch.float16 else "take an earlier checkpoint"
        raise ExportError(
            f"{names[0]} holds NaN or infinities as {str(dtype).removeprefix('torch.')}: its values are too large for "
            f"that dtype (which ends at {torch.finfo(dtype).max:,.6g}), or no numbers in the source; {remedy}"
        )


@dataclass(frozen=True, slots=True)
class StagedExport:
    """A model on its way into a folder, as it was when it was staged: training may go on meanwhile."""

    _plan: "ExportPlan"
    _shards: HostShards
    _buffers: Collection[str]

    @classmethod
    @torch.no_grad()
    def of(cls, plan: "ExportPlan", buffers: StagingBuffers) -> Self:
        """Collective where adapters are merged. Begins to copy this rank's shards, in the dtypes of the file."""
        model = plan.model
        merged = merged_state(model)
        shards = HostShards(buffers)
        for block in plan.blocks:
            for name in block.runtime_names:
                shards.add(name, merged[name], block.dtypes[name])
            if has_adapters(model):
                buffers.copies.wait()  # merged tensors are temporary: one block of them at a time
        return cls(plan, shards, buffer_names(model))

    def nonfinite_names(self) -> list[str]:
        """Names of the tensors whose part on this rank holds NaN or, where it is no buffer, an infinity."""
        return self._shards.nonfinite_names(may_be_infinite=self._buffers)

    @torch.no_grad()
    def write(self, folder: Path, tokenizer: Callable[[], Any], links: Connections) -> None:
        """To be called on every rank. Writes this rank's files into an existing folder, and on rank 0 the configs.
        Raises OSError, but only after it has done its part for the other ranks."""
        writers = self._plan.writers(folder)
        for block in self._plan.blocks:
            for writer in self._plan.writing_ranks(block):
                full = [self._shards.whole(name, writer, links) for name in block.runtime_names]
                writers.write(block, [tensor for tensor in full if tensor is not None])
        writers.finish()
        if self._plan.rank == 0:
            self._plan.write_configs(folder, tokenizer())

    def finish(self, folder: Path) -> None:
        """Finishes the folder; called on one rank when every rank has written. Raises OSError."""
        self._plan.finish(folder)


def _num_parameters(model: PreTrainedModel) -> int:
    """Number of parameters of the exported model: tied weights count once, adapters not at all."""
    left_out = set(model.get_expanded_tied_weights_keys()) | buffer_names(model)
    return sum(tensor.numel() for name, tensor in runtime_state(model).items() if name not in left_out)


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Which tensor goes into which file, known from shapes alone and the same on every rank but for `rank`."""

    model: PreTrainedModel
    """A writer in the background reads nothing but its configs."""
    dtype: torch.dtype
    blocks: list[ExportBlock]
    specs: dict[str, dict[str, TensorSpec]]
    """File name -> tensor name -> dtype and shape. File i is written by rank i modulo the number of ranks."""
    file_of: dict[str, str]
    total_bytes: int
    num_parameters: int
    rank: int
    num_ranks: int

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype, *, max_shard_size: int | str = MAX_SHARD_SIZE) -> Self:
        """Assigns tensors to files by save_pretrained's rule: in order, and the parts of one fused tensor that share
        its storage stay together."""
        blocks = export_blocks(model, runtime_state(model), dtype)
        tensors = {name: tensor for block in blocks for name, tensor in block.hub_tensors.items()}
        split = split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
            get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        specs = {
            file: {name: TensorSpec.of(tensors[name]) for name in names}
            for file, names in split.filename_to_tensors.items()
        }
        return cls(
            model,
            dtype,
            blocks,
            specs,
            split.tensor_to_filename,
            split.metadata["total_size"],
            _num_parameters(model),
            dist.get_rank(),
            dist.get_world_size(),
        )

    def writing_ranks(self, block: ExportBlock) -> list[int]:
        """The ranks whose files get a part of the block."""
        places = {file: place for place, file in enumerate(self.specs)}
        return sorted({places[self.file_of[name]] % self.num_ranks for name in block.hub_tensors})

    def writers(self, folder: Path) -> "_RankWriters":
        """Returns the writers of this rank's files."""
        return _RankWriters(folder, self)

    def write_configs(self, folder: Path, tokenizer: Any) -> None:
        """Writes everything but weights. Raises OSError."""
        model = self.model
        content = {**model.config.to_dict(), "dtype": str(self.dtype).removeprefix("torch.")}
        content.pop("quantization_config", None)  # of packed weights; those written here are plain
        config = model.config.__class__.from_dict(content)
        config.architectures = [type(model).__name__]
        if made := auto_map(model):
            config.auto_map = made
            (folder / CODE_NAME).write_text(class_code(model), encoding="utf-8")
        elif model.is_remote_code():
            custom_object_save(model, folder, config=config)
        text = config.get_text_config()
        if _is_classifier(model) and text.pad_token_id is None and tokenizer.pad_token_id != tokenizer.eos_token_id:
            text.pad_token_id = tokenizer.pad_token_id  # without one transformers scores no batches
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _forget_missing_code(folder / "tokenizer_config.json")
        copy_processor_files(Path(model.config.name_or_path), folder)

    def finish(self, folder: Path) -> None:
        """Writes the index if there are several files, and makes the folder durable; called when every rank has
        written. Raises OSError, also if a file that a rank has written is not there."""
        for name in self.specs:
            (folder / name).stat()
        if len(self.specs) > 1:
            metadata = {"total_parameters": self.num_parameters, "total_size": self.total_bytes}
            tree = {"metadata": metadata, "weight_map": self.file_of}
            (folder / INDEX_NAME).write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        fsync_folder(folder)


def _forget_missing_code(file: Path) -> None:
    """Drops the entries of a tokenizer's `auto_map` whose code should be beside the file but is not. Raises OSError."""
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    named = content.pop("auto_map", {})
    by_class = named if isinstance(named, dict) else {"AutoTokenizer": named}  # the pair alone, an old form
    kept = {auto: places for auto, places in by_class.items() if _has_code(places, file.parent)}
    if kept != by_class:
        content |= {"auto_map": kept} if kept else {}
        file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _has_code(places: str | list[str | None], folder: Path) -> bool:
    """Whether the code is in the folder, or in a repository of the hub.

    Args:
        places: `file.Class` or `owner/name--file.Class`, or a pair of them for a slow and a fast tokenizer.
    """
    every = [place for place in (places if isinstance(places, list) else [places]) if place is not None]
    return all("--" in place or (folder / f"{place.rpartition('.')[0]}.py").is_file() for place in every)


def _is_classifier(model: PreTrainedModel) -> bool:
    return model.get_output_embeddings() is None


class _RankWriters:
    """Writers of this rank's files. After a failure it writes nothing more and `finish` raises the error, so that the
    collectives around it go on."""

    def __init__(self, folder: Path, plan: ExportPlan) -> None:
        self._folder = folder
        self._plan = plan
        self._mine = set(list(plan.specs)[plan.rank :: plan.num_ranks])
        self._open: dict[str, SafetensorsWriter] = {}
        self._error: OSError | None = None

    def write(self, block: ExportBlock, full: list[Tensor]) -> None:
        """Writes what belongs in this rank's files; `full` may be empty where nothing does. Takes the tensors out of
        `full`."""
        mine = {name for name in block.hub_tensors if self._plan.file_of[name] in self._mine}
        if not mine or not full or self._error is not None:
            return
        try:
            for name, tensor in block.convert(full):
                if name in mine:
                    self._write(self._plan.file_of[name], name, tensor)
        except OSError as error:
            self._error = error

    def _write(self, file: str, name: str, tensor: Tensor) -> None:
        if file not in self._open:
            self._open[file] = SafetensorsWriter(self._folder / file, self._plan.specs[file])
        writer = self._open[file]
        writer.write(name, tensor)
        if writer.is_complete:
            writer.close()
            del self._open[file]

    def finish(self) -> None:
        """Raises OSError: what kept this rank from writing."""
        if self._error is not None:
            for writer in self._open.values():
                writer.abandon()
            raise self._error
        assert not self._open, f"{sorted(self._open)} lack tensors"
