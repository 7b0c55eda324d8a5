"""Loads weights from a model folder into a sharded model: every rank reads what its own shards need."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.config import ModelError
from shardwise.console import listed
from shardwise.engine.agreement import raised_on_every_rank
from shardwise.engine.files.conversions import ImportBlock, export_blocks, import_blocks
from shardwise.engine.files.model_folder import ModelFolder
from shardwise.engine.files.safetensors_file import TensorSpec
from shardwise.engine.heads import LANGUAGE_MODEL_PROJECTIONS, value_projection_name
from shardwise.engine.quantized import QuantizedLinear, quantized_weights
from shardwise.engine.runtime_state import buffer_names, copied_state, runtime_state
from shardwise.engine.shards import local_box, local_shard
from shardwise.ops import nonfinite_names

LOADABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LOADABLE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in LOADABLE_DTYPES)
"""LOADABLE_DTYPES in words, for errors."""


class TensorFolder(Protocol):
    """What is known of stored tensors before they are read."""

    @property
    def folder(self) -> Path: ...

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...


@torch.no_grad()
def load_weights(
    model: PreTrainedModel,
    folder: Path,
    *,
    fresh: Mapping[str, Tensor] | None = None,
    require_finite: bool = True,
    only: Collection[str] | None = None,
    copies: bool = False,
) -> int:
    """Collective. Fills every parameter and persistent buffer of a materialized (sharded or whole) model, cast to its
    dtype.

    The peak on the host beside the shards is one tensor's slice, or the matrices of one expert. Conversions that do not
    join experts along dim 0 need their sources whole, and convert them before they are sliced.

    Args:
        fresh: for a model with a value head: name -> whole tensor of the head, used if the folder lacks it; the
            projection of a language model that the folder may have instead is left out. None for a language model.
        require_finite: False also takes weights that hold NaN or infinities.
        only: the names of what is filled, in the transformers class; the rest stays as it is. None: everything.
        copies: fills the trained copies of modules_to_save, not the base; their dtype may be more precise than the
            base's.
    Returns:
        The bytes this rank read.
    Raises:
        ModelError: on every rank, if on any rank a tensor is missing, left over, of another shape or of a dtype that is
            no weight's, holds NaN, an infinity or, for a weight in float16, more than 65,504 where that rank reads it,
            or a file cannot be read; or if the folder has two tensors that differ for a weight that config.json ties.
    """
    with raised_on_every_rank(ModelError), ModelFolder(folder, require_finite=require_finite) as source:
        runtime = runtime_state(model)
        copied = copied_state(model) if copies else {}
        if copies and not copied:
            return 0
        wanted = set((copied if copies else runtime) if only is None else only)
        targets = _Targets(runtime | copied, quantized_weights(model), wanted, buffer_names(model))
        blocks, copies_of = checked_blocks(model, runtime, source, fresh)
        found = {block.first_target for block in blocks}
        for name, whole in (fresh or {}).items():
            if name not in found:
                targets.fill(name, whole[tuple(local_box(targets.runtime[name]))])
        num_bytes = sum(_load_block(block, source, targets) for block in blocks)
        for original, stored_copy in copies_of.items():
            if original in targets.filled:
                loaded = local_shard(targets.runtime[original])
                part = source.read(stored_copy, local_box(targets.runtime[original]))
                require_same_copy(stored_copy, original, part.to(loaded.device, loaded.dtype), loaded, source.folder)
                num_bytes += part.nbytes
        if require_finite:
            _require_in_range(targets, folder)
        return num_bytes


def require_same_copy(name: str, original: str, found: Tensor, expected: Tensor, folder: Path) -> None:
    """Raises ModelError unless a stored tensor equals the weight that config.json ties it to: training would drop
    it."""
    if not bool(((found == expected) | (found.isnan() & expected.isnan())).all()):
        raise ModelError(
            f"{folder} holds a {name} that differs from {original}, and its config.json ties the two "
            "(tie_word_embeddings=true); set that to false there to keep both, or remove the one that is not meant"
        )


@dataclass(frozen=True, slots=True)
class _Targets:
    """What is filled, by name in the transformers class."""

    runtime: dict[str, Tensor]
    quantized: Mapping[str, QuantizedLinear]
    filled: Collection[str]
    buffers: Collection[str]
    """Names of tensors that nothing trains: infinities there are the model's own."""

    def fill(self, name: str, part: Tensor) -> None:
        """Fills a tensor; `part` is what this rank holds of it."""
        if name not in self.filled:
            return
        if name in self.quantized:
            self.quantized[name].fill(part)
        else:
            local_shard(self.runtime[name]).copy_(part)


def _require_in_range(targets: _Targets, folder: Path) -> None:
    """Raises ModelError: a number is too large for the float16 weight that it was cast to."""
    cast = {name for name, tensor in targets.runtime.items() if tensor.dtype == torch.float16}
    cast = (cast & set(targets.filled)) - targets.quantized.keys() - set(targets.buffers)
    if names := nonfinite_names((name, local_shard(targets.runtime[name])) for name in sorted(cast)):
        raise ModelError(
            f"{folder}: {listed(names)} holds numbers beyond {torch.finfo(torch.float16).max:,.0f}, the largest of "
            "float16; set param_dtype to bfloat16 or float32"
        )


def _load_block(block: ImportBlock, source: ModelFolder, targets: _Targets) -> int:
    """Fills what a block becomes. Returns the bytes read."""
    first = targets.runtime[block.first_target]
    box, is_filled = local_box(first), block.first_target in targets.filled
    # A shard is empty where a dimension has fewer rows than there are ranks.
    if block.has_one_target and (not is_filled or local_shard(first).numel() == 0):
        return 0
    if block.is_renaming:
        (name,) = block.stored_names()
        part = source.read(name, box, may_be_infinite=block.first_target in targets.buffers)
        targets.fill(block.first_target, part)
        return part.nbytes
    if block.merges_rows:
        return sum(
            _load_row(block, source, row, local_row, box)
            for row, local_row in zip(range(box[0].start, box[0].stop), local_shard(first), strict=True)
        )
    tensors = {name: source.read(name) for name in block.stored_names()}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in block.convert(tensors).items():
        targets.fill(name, tensor[tuple(local_box(targets.runtime[name]))])
    return num_bytes


def _load_row(block: ImportBlock, source: ModelFolder, row: int, local_row: Tensor, box: list[slice]) -> int:
    """Fills one row, which is one expert. Returns the bytes read."""
    tensors = {name: source.read(name) for name in block.stored_names(slice(row, row + 1))}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    local_row.copy_(block.convert(tensors)[block.first_target][0][tuple(box[1:])])
    return num_bytes


@dataclass(slots=True)
class _Misfits:
    """What keeps a folder from being loaded into a model, in words."""

    missing: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)
    wrong_dtype: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)

    def raise_if_any(self, model: PreTrainedModel, folder: Path) -> None:
        labels = {
            "missing": self.missing,
            "of the wrong shape": self.wrong_shape,
            f"not stored as {LOADABLE_NAMES}": self.wrong_dtype,
            "not part of the model": self.extra,
        }
        problems = "; ".join(_problem(label, names) for label, names in labels.items() if names)
        if problems:
            remedy = "the config.json that was saved with these weights"
            if self.wrong_dtype:
                remedy = "a checkpoint that is not quantised"
            raise ModelError(
                f"{folder} does not fit its config.json ({type(model).__name__}): {problems}. Take {remedy}"
            )


def _problem(label: str, names: list[str]) -> str:
    return f"{len(names)} {'tensor is' if len(names) == 1 else 'tensors are'} {label} ({listed(names)})"


def checked_blocks(
    model: PreTrainedModel,
    runtime: dict[str, Tensor],
    source: TensorFolder,
    fresh: Mapping[str, Tensor] | None = None,
) -> tuple[list[ImportBlock], dict[str, str]]:
    """Groups stored tensors into blocks, and checks that they fit the model.

    Returns:
        The blocks that fill the model; and, for weights that config.json ties but the folder has twice, the name of the
        one that is filled -> the stored name of the other.
    Raises:
        ModelError: the folder does not fit the model; lists why.
    """
    if fresh is not None:
        _check_value_head(f"{value_projection_name(model)}.weight", source, fresh)
    originals: dict[str, str] = model.get_expanded_tied_weights_keys()
    blocks, unused = import_blocks(model, runtime, source.specs)
    blocks = _filling_originals(blocks, originals)
    missing, expected = _expected_tensors(model, runtime, {block.first_target: block for block in blocks})
    misfits = _Misfits(missing=sorted(set(missing) - set(fresh or ())))
    block_of = {name: block for block in blocks for name in block.stored_names()}
    for name, tensor in sorted(expected.items()):
        spec = source.specs[name]
        if not block_of[name].takes(spec.shape, tuple(tensor.shape)):
            misfits.wrong_shape.append(f"{name} is {list(spec.shape)}, expected {list(tensor.shape)}")
        if spec.dtype != tensor.dtype and not (tensor.is_floating_point() and spec.dtype in LOADABLE_DTYPES):
            misfits.wrong_dtype.append(f"{name} is {str(spec.dtype).removeprefix('torch.')}")
    copies: dict[str, str] = {}
    there = {block.first_target for block in blocks}
    for block in blocks:
        original = originals.get(block.first_target)
        if original in there and block.is_renaming:
            (copies[original],) = block.stored_names()
            shape, wanted = source.specs[copies[original]].shape, tuple(runtime[original].shape)
            if shape != wanted:
                misfits.wrong_shape.append(f"{copies[original]} is {list(shape)}, expected {list(wanted)}")
    left_over = unused | {name: block.first_target for block in blocks for name in block.stored_names()}
    ignored = originals.keys() | buffer_names(model)
    misfits.extra = sorted(
        name
        for name, target in left_over.items()
        if name not in expected and target not in ignored and not _is_ignored(model, name)
        if fresh is None or target.split(".")[0] not in LANGUAGE_MODEL_PROJECTIONS
    )
    misfits.raise_if_any(model, source.folder)
    return [block for block in blocks if block.first_target not in originals], copies


def _filling_originals(blocks: list[ImportBlock], originals: Mapping[str, str]) -> list[ImportBlock]:
    """Has a tied copy fill its original where the folder lacks that: of shared tensors safetensors' save_model keeps
    the name that comes first in the alphabet."""
    there = {block.first_target for block in blocks}
    filling = []
    for block in blocks:
        original = originals.get(block.first_target)
        if original is not None and original not in there and block.is_renaming:
            there.add(original)
            block = block.filling(original)
        filling.append(block)
    return filling


def _check_value_head(name: str, source: TensorFolder, fresh: Mapping[str, Tensor]) -> None:
    stored = source.specs.get(name)
    if stored is None and not fresh:
        raise ModelError(
            f"{source.folder} has no value head ({name}), and one that starts at random would never be trained "
            "in a frozen engine; give the folder of a trained critic or reward model"
        )
    if stored is not None and stored.shape[0] != 1:
        raise ModelError(
            f"{source.folder} has a head for {stored.shape[0]} labels ({name} is {list(stored.shape)}), and a "
            "critic or reward model has one; give a model with num_labels=1"
        )


def _expected_tensors(
    model: PreTrainedModel, runtime: dict[str, Tensor], found: dict[str, ImportBlock]
) -> tuple[list[str], dict[str, Tensor]]:
    """Returns the hub names that no block holds; and for every stored tensor that has a place, a tensor of the shape it
    must have.

    A checkpoint may also hold runtime tensors (fused experts) under their runtime names.
    """
    exports = export_blocks(model, runtime, torch.float32)
    places = _places(import_blocks(model, runtime, [name for export in exports for name in export.hub_tensors])[0])
    missing: list[str] = []
    expected: dict[str, Tensor] = {}
    for export in exports:
        if all(name in found and found[name].is_renaming for name in export.runtime_names):
            expected |= {found[name].stored_names()[0]: runtime[name] for name in export.runtime_names}
            continue
        for hub_name, tensor in export.hub_tensors.items():
            first_target, pattern, canonical = places[hub_name]
            stored = found[first_target].sources.get(pattern, {}).get(canonical) if first_target in found else None
            if stored is None:
                missing.append(hub_name)
            else:
                expected[stored] = tensor
    return missing, expected


def _places(blocks: list[ImportBlock]) -> dict[str, tuple[str, str, str]]:
    """Stored name -> first target, pattern and canonical name."""
    return {
        stored: (block.first_target, pattern, canonical)
        for block in blocks
        for pattern, names in block.sources.items()
        for canonical, stored in names.items()
    }


def _is_ignored(model: PreTrainedModel, name: str) -> bool:
    """Whether a tensor is one that a family's hub checkpoints hold beside the model, such as those of DeepSeek-V3's
    layer for multi-token prediction."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    return any(re.search(pattern, name) for pattern in patterns)
