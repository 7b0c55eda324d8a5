"""How the tensors of a checkpoint become those of a model, and back, by transformers' own rules for each family.

Files hold *hub* tensors, a model computes with *runtime* tensors: other names in some families, and in most mixtures of
experts one fused [E, ...] parameter for the E experts' matrices of the hub. The loops follow
`transformers.core_model_loading` (convert_and_load_state_dict_in_model, revert_weight_conversion), which does the whole
model at once; here every block is converted by itself, so that only one at a time needs memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    PrefixChange,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from shardwise.engine.model_classes import language_model_rules
from shardwise.stored_dtypes import stored_dtypes

_NUM_PIECES = 8
"""Number of pieces in which the fused experts of a layer are taken apart."""


@dataclass(frozen=True, slots=True)
class ExportBlock:
    """Runtime tensors that become hub tensors together: one that is renamed, or a fused one that is taken apart.

    Example:
        runtime_names ("model.layers.0.mlp.experts.down_proj",), hub_tensors {"model.layers.0.mlp.experts.0.down_proj
        .weight": meta tensor [H, I], "...experts.1.down_proj.weight": ...}
    """

    runtime_names: tuple[str, ...]
    hub_tensors: dict[str, Tensor]
    """On the meta device: shapes, dtypes, and which of them are views of one storage."""
    dtypes: dict[str, torch.dtype]
    """Runtime name -> the dtype to convert in, which is that of the file."""
    _transform: "_Transform"

    def convert(self, tensors: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Converts full runtime tensors, in the order of `runtime_names`, and yields (hub name, tensor), each once;
        fused experts a few at a time, so that little memory is needed beside the fused tensor.

        Takes the tensors out of the list. Whoever keeps an expert keeps no other memory with it.
        """
        named = dict(zip(self.runtime_names, tensors, strict=True))
        tensors.clear()
        names = list(self.hub_tensors)
        if not self._transform.splits_rows:
            yield from zip(names, self._transform.run(named).values(), strict=True)
            return
        ((fused_name, fused),) = named.items()
        named.clear()
        num_rows = len(fused)
        of_patterns = [names[first : first + num_rows] for first in range(0, len(names), num_rows)]
        step = -(-num_rows // _NUM_PIECES)
        for first in range(0, num_rows, step):
            rows = slice(first, first + step)
            parts = self._transform.run({fused_name: fused[rows]}).values()
            names_of_rows = [name for of_pattern in of_patterns for name in of_pattern[rows]]
            for name, part in zip(names_of_rows, parts, strict=True):
                yield name, part.clone() if _share_memory(part, fused) else part


@dataclass(frozen=True, slots=True)
class ImportBlock:
    """Stored tensors that become runtime tensors together."""

    first_target: str
    """The runtime tensor that they become, or the first of several."""
    sources: dict[str, dict[str, str]]
    """Pattern of the rule -> canonical name -> name in the file, in the order in which they are joined. Checkpoints
    that leave out the backbone's prefix, or use older names, agree in canonical names."""
    _transform: "_Transform"

    @property
    def is_renaming(self) -> bool:
        """Whether the stored tensor is the runtime tensor, maybe under another name."""
        return self._transform.converter is None

    @property
    def has_one_target(self) -> bool:
        return self._transform.converter is None or len(self._transform.converter.target_patterns) == 1

    @property
    def merges_rows(self) -> bool:
        """Whether row i of the runtime tensor is made of the i-th source of every pattern and nothing else."""
        if self._transform.converter is None:
            return False
        merge, *rest = self._transform.converter.operations
        return isinstance(merge, MergeModulelist) and merge.dim == 0 and all(_keeps_rows(op) for op in rest)

    def filling(self, target: str) -> Self:
        """Returns a renaming block with another target."""
        return replace(self, first_target=target, _transform=replace(self._transform, key=target))

    def takes(self, shape: tuple[int, ...], written: tuple[int, ...]) -> bool:
        """Returns whether a stored tensor may have this shape, though a written one has another: transformers also
        reads some transposed (the fused experts of Qwen3-VL-MoE, as the hub has them)."""
        dims = list(range(len(shape)))
        for operation in [] if self._transform.converter is None else self._transform.converter.operations:
            if isinstance(operation, Transpose) and operation.check_dims and shape != written:
                first, second = operation.dim0, operation.dim1
                dims[first], dims[second] = dims[second], dims[first]
        return tuple(shape[dim] for dim in dims) == written

    def stored_names(self, rows: slice = slice(None)) -> list[str]:
        """The names to read, of all patterns; with `merges_rows` also those of some rows only."""
        return [name for names in self.sources.values() for name in list(names.values())[rows]]

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Stored tensors by their names in the file -> runtime tensors by name. Takes the tensors out of `tensors`."""
        return self._transform.run(tensors)


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Stands in for the model when rules ask for its config or parameters: a model with adapters does not have its
    parameters under the names of its class."""

    config: PreTrainedConfig
    runtime: Mapping[str, Tensor]

    def get_parameter(self, name: str) -> Tensor:
        return self.runtime[name]


@dataclass(frozen=True, slots=True)
class _Transform:
    """A rule of transformers for the tensors of one block."""

    shapes: "_Shapes"
    key: str
    """The name by which transformers groups the block."""
    converter: WeightConverter | None
    """None: the tensor is only renamed."""
    pattern_of: dict[str, str] = field(default_factory=dict)
    """Name of an input -> the pattern of the converter that it matches."""

    def run(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.converter is None:
            (name,) = tensors
            return {self.key: tensors.pop(name)}
        converter = deepcopy(self.converter)
        for name in list(tensors):
            converter.add_tensor(self.key, name, self.pattern_of[name], tensors.pop(name))
        converted = converter.convert(self.key, model=self.shapes, config=self.shapes.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    @property
    def splits_rows(self) -> bool:
        """Whether it has one input, whose row i becomes the i-th output of every pattern and nothing else, with the
        outputs in the order of the patterns."""
        if self.converter is None or len(self.pattern_of) != 1:
            return False
        *rest, split = self.converter.operations
        return isinstance(split, SplitModulelist) and split.dim == 0 and all(_keeps_rows(op) for op in rest)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _keeps_rows(operation: object) -> bool:
    match operation:
        case Concatenate(dim=dim) | Chunk(dim=dim):
            return dim > 0
        case Transpose(dim0=dim0, dim1=dim1, check_dims=check_dims):
            return dim0 > 0 and dim1 > 0 and not check_dims
    return False


def export_blocks(model: PreTrainedModel, runtime: Mapping[str, Tensor], dtype: torch.dtype) -> list[ExportBlock]:
    """Returns the blocks of what `save_pretrained` in `dtype` writes for these runtime tensors, in its order; tied
    copies left out.

    Only the shapes and dtypes of the tensors matter. The model says which rules apply to its family.
    """
    dtypes = stored_dtypes(model, runtime, dtype)
    ignored = set(model._keys_to_ignore_on_save or ())
    meta = {
        name: torch.empty(runtime[name].shape, dtype=stored, device="meta")
        for name, stored in dtypes.items()
        if name not in ignored
    }
    rules = [
        rule for rule in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(rule, PrefixChange)
    ]
    reverse = [rule.reverse_transform() for rule in reversed(rules)]
    renamings = [rule for rule in reverse if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in reverse if isinstance(rule, WeightConverter)]
    shapes = _Shapes(model.config, runtime)
    transforms: dict[str, _Transform] = {}
    members: dict[str, list[str]] = {}
    for name in sorted(meta, key=dot_natural_key) if rules else meta:
        key, pattern = rename_source_key(name, [], converters)
        if pattern is None:
            key = _renamed(name, renamings)
        transform = transforms.setdefault(key, _Transform(shapes, key, _owner(pattern, converters)))
        if pattern is not None:
            transform.pattern_of[name] = pattern
        members.setdefault(key, []).append(name)
    blocks = []
    for key, transform in transforms.items():
        hub = transform.run({name: meta[name] for name in members[key]})
        if transform.converter is not None:
            hub = {_renamed(name, renamings): tensor for name, tensor in hub.items()}
        stored = {name: dtypes[name] for name in members[key]}
        blocks.append(ExportBlock(tuple(members[key]), hub, stored, transform))
    return blocks


def import_blocks(
    model: PreTrainedModel, runtime: Mapping[str, Tensor], stored_names: Iterable[str]
) -> tuple[list[ImportBlock], dict[str, str]]:
    """Groups the tensors of a checkpoint by the runtime tensors that they become.

    Returns:
        The blocks, and the names that become nothing in this model, each with the name that renaming gave it.
    """
    targets = dict(runtime)
    prefix = model.base_model_prefix
    rules = [*language_model_rules(model), *get_model_conversion_mapping(model)]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    shapes = _Shapes(model.config, runtime)
    blocks: dict[str, ImportBlock] = {}
    unused: dict[str, str] = {}
    for stored in sorted(stored_names, key=dot_natural_key):
        renamed = _renamed(stored, renamings)
        target, pattern = rename_source_key(renamed, [], converters, prefix, targets)
        if target not in targets and stored in targets:
            renamed = target = stored
            pattern = None
        if target not in targets:
            unused[stored] = target
            continue
        new = ImportBlock(target, {}, _Transform(shapes, target, _owner(pattern, converters)))
        block = blocks.setdefault(target, new)
        if pattern is None or block.is_renaming:  # the later of two tensors for one place is taken
            unused |= dict.fromkeys(block.stored_names(), target)
            block = blocks[target] = new
        slot = pattern if pattern is not None else target
        block.sources.setdefault(slot, {})[renamed.removeprefix(f"{prefix}.")] = stored
        block._transform.pattern_of[stored] = slot
    return list(blocks.values()), unused


def _renamed(name: str, renamings: list[WeightRenaming]) -> str:
    renamed: str = rename_source_key(name, renamings, [])[0]
    return renamed


def _owner(pattern: str | None, converters: list[WeightConverter]) -> WeightConverter | None:
    """The last converter that has the pattern, as in transformers."""
    return {source: converter for converter in converters for source in converter.source_patterns}.get(pattern)
