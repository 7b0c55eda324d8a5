"""The training state of an engine, saved and loaded on any layout: the planners of torch.distributed.checkpoint say
which rank writes and reads what, `state_files` is where it lies.

Saved are the masters of the trained parameters, the optimizer's states and the numbers beside them. Frozen parameters
are not: they are those of the model folder.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardwise.config import ExportError, ModelError
from shardwise.engine.agreement import raised_on_every_rank
from shardwise.engine.exchange import all_gather_json
from shardwise.engine.export import fsync_folder, named_failures
from shardwise.engine.optimizer import MASTER, ShardedOptimizer
from shardwise.engine.safetensors_file import DTYPE_NAMES, NAME_OF_DTYPE, SafetensorsReader, TensorSpec, differences
from shardwise.engine.staging import Copies, StagingBuffers
from shardwise.engine.state_files import Part, ShardFile, StateIndex, shard_name
from shardwise.ops import nonfinite_names


@torch.no_grad()
def save_state(optimizer: ShardedOptimizer, folder: Path) -> None:
    """Collective. Writes what training goes on from; of a shard that several ranks hold, one copy.

    Args:
        folder: on a file system that all ranks see; what is there is overwritten.
    Raises:
        ExportError: on every rank, if a rank could not write.
    """
    state = StagedState.of(optimizer)
    file: ShardFile | None = None
    with raised_on_every_rank(ExportError), named_failures(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = state.write(folder)
    files = all_gather_json(None if file is None else asdict(file))
    with raised_on_every_rank(ExportError), named_failures(folder):
        if dist.get_rank() == 0:
            state.finish(folder, [None if tree is None else ShardFile(**tree) for tree in files])


@dataclass(frozen=True, slots=True)
class StagedState:
    """A training state on its way into a folder."""

    _plans: list[SavePlan]
    _mine: dict[str, Tensor]
    """Parts of tensors that this rank writes."""
    _numbers: dict[str, Any]
    _rank: int
    _copies: Copies | None

    @classmethod
    @torch.no_grad()
    def of(cls, optimizer: ShardedOptimizer, buffers: StagingBuffers | None = None) -> Self:
        """Collective. With `buffers` it is the state as it is now: the optimizer goes on when their copies are made.
        Without them it must be written before the next step."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(optimizer.named_tensors(), is_coordinator=dist.get_rank() == 0)
        plans, rank = _agree(planner), dist.get_rank()
        mine = {item.index.fqn: cast(Tensor, planner.resolve_data(item)) for item in plans[rank].items}
        if buffers is not None:
            mine = {name: buffers.copy(name, tensor) for name, tensor in mine.items()}
        return cls(plans, mine, optimizer.numbers(), rank, None if buffers is None else buffers.copies)

    def nonfinite_names(self) -> list[str]:
        """Of the masters (by the weight's name) and states (`exp_avg/NAME`) of which this rank's part holds NaN or an
        infinity."""
        self._finish_copies()
        return nonfinite_names((name.removeprefix(MASTER), tensor) for name, tensor in self._mine.items())

    def write(self, folder: Path) -> ShardFile | None:
        """Writes this rank's file into an existing folder; None if it has none. Raises OSError."""
        if not self._mine:
            return None
        self._finish_copies()
        specs = {name: TensorSpec.of(tensor) for name, tensor in self._mine.items()}
        return ShardFile.write(folder / shard_name(self._rank), specs, self._mine.items())

    def finish(self, folder: Path, files: Sequence[ShardFile | None]) -> None:
        """On one rank, when every rank has written: what `write` gave, by rank. Raises OSError."""
        written = {shard_name(rank): file for rank, file in enumerate(files) if file is not None}
        _index(self._plans, written, self._numbers).write(folder)
        fsync_folder(folder)

    def _finish_copies(self) -> None:
        if self._copies is not None:
            self._copies.finish()


@torch.no_grad()
def load_state(optimizer: ShardedOptimizer, folder: Path, *, verify: bool = True) -> None:
    """Collective. Takes over what `save_state` wrote on any number of ranks; each rank reads its own shards.

    Every file is verified, and every name, shape and dtype compared, before a tensor is changed. verify=False leaves
    the hashes out, where they have been compared already.

    Raises:
        ModelError: on every rank: a file is missing or damaged, or the state is one of other parameters or of another
            optimizer; names the file, or the tensors.
    """
    with raised_on_every_rank(ModelError):
        index = StateIndex.read(folder)
        if verify:
            verify_files(index, folder)
        optimizer.check_numbers(index.numbers)
        _require_same(folder, optimizer.named_tensors(), index, only=MASTER)
    optimizer.create_states({name.partition("/")[2] for name in index.specs if not name.startswith(MASTER)})
    tensors = optimizer.named_tensors()
    with raised_on_every_rank(ModelError):
        _require_same(folder, tensors, index)
    with raised_on_every_rank(ModelError):
        _read_shards(tensors, index, folder)
    optimizer.load_numbers(index.numbers)


def verify_files(index: StateIndex, folder: Path) -> None:
    """Reads this rank's share of the files, so that the ranks together read each once. Raises ModelError."""
    for name in sorted(index.files)[dist.get_rank() :: dist.get_world_size()]:
        index.files[name].verify(folder / name)


def _agree(planner: DefaultSavePlanner) -> list[SavePlan]:
    """Collective. What each rank writes; the same list on every rank, without shards that have no elements."""
    items = [_item_to_json(item) for item in planner.create_local_plan().items]
    by_rank = all_gather_json([item for item in items if 0 not in item["sizes"]])
    plans, _ = planner.create_global_plan([SavePlan([_item_from_json(item) for item in items]) for items in by_rank])
    return plans


def _item_to_json(item: WriteItem) -> dict[str, Any]:
    data = item.tensor_data
    assert data is not None, f"{item.index.fqn} is no tensor"
    return {
        "name": item.index.fqn,
        "type": item.type.name,
        "dtype": NAME_OF_DTYPE[data.properties.dtype],
        "shape": list(data.size),
        "offsets": list(data.chunk.offsets),
        "sizes": list(data.chunk.sizes),
    }


def _item_from_json(tree: dict[str, Any]) -> WriteItem:
    shape, offsets, sizes = (torch.Size(tree[key]) for key in ("shape", "offsets", "sizes"))
    return WriteItem(
        index=MetadataIndex(tree["name"], offsets),
        type=WriteItemType[tree["type"]],
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, sizes),
            properties=TensorProperties(dtype=DTYPE_NAMES[tree["dtype"]]),
            size=shape,
        ),
    )


def _index(plans: list[SavePlan], files: dict[str, ShardFile], numbers: dict[str, Any]) -> StateIndex:
    specs: dict[str, TensorSpec] = {}
    parts: dict[str, list[Part]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            specs[item.index.fqn] = TensorSpec(data.properties.dtype, tuple(data.size))
            part = Part(tuple(data.chunk.offsets), tuple(data.chunk.sizes), shard_name(rank))
            parts.setdefault(item.index.fqn, []).append(part)
    return StateIndex(specs, parts, files, numbers)


def _require_same(folder: Path, tensors: Mapping[str, Tensor], index: StateIndex, *, only: str = "") -> None:
    """Raises ModelError unless the stored tensors whose names begin with `only` are those of the engine."""
    wanted = {name: TensorSpec.of(tensor) for name, tensor in tensors.items() if name.startswith(only)}
    stored = {name: spec for name, spec in index.specs.items() if name.startswith(only)}
    if problems := differences(wanted, stored):
        raise ModelError(
            f"{folder} is not the state of this engine: {problems}; resume with the model, the optimizer, the dtypes "
            "and the adapters that it was saved with"
        )


def _read_shards(tensors: dict[str, Tensor], index: StateIndex, folder: Path) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, index.metadata(), is_coordinator=dist.get_rank() == 0)
    readers: dict[str, SafetensorsReader] = {}
    with ExitStack() as stack:
        for item in planner.create_local_plan().items:
            file = index.file_of(item.storage_index.fqn, item.storage_index.offset)
            if file not in readers:
                readers[file] = stack.enter_context(closing(SafetensorsReader(folder / file)))
            box = [slice(start, start + size) for start, size in zip(item.storage_offsets, item.lengths, strict=True)]
            planner.resolve_tensor(item).copy_(readers[file].read(item.storage_index.fqn, box))
