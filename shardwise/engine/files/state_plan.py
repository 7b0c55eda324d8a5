"""Which rank writes which part of a training state, as the planners of torch.distributed.checkpoint deal it out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardwise.engine.exchange import all_gather_json
from shardwise.engine.files.safetensors_file import DTYPE_NAMES, NAME_OF_DTYPE, TensorSpec
from shardwise.engine.files.state_files import Part, ShardFile, StateIndex, shard_name


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Which rank writes what. It holds for every save of tensors of these names, shapes and dtypes, so the ranks agree
    on it once."""

    _specs: dict[str, TensorSpec]
    """Name -> dtype and shape of the whole tensor."""
    _by_rank: list[SavePlan]
    """Each rank's plan, without shards that have no elements; one copy of a shard that several ranks hold."""

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Self:
        """Collective. Makes the plan, the same on every rank."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, is_coordinator=dist.get_rank() == 0)
        items = [_item_to_json(item) for item in planner.create_local_plan().items]
        by_rank = all_gather_json([item for item in items if 0 not in item["sizes"]])
        plans, _ = planner.create_global_plan(
            [SavePlan([_item_from_json(item) for item in items]) for items in by_rank]
        )
        return cls(_specs_of(tensors), plans)

    def holds_for(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the plan holds for these tensors; the same answer on every rank."""
        return self._specs == _specs_of(tensors)

    def names_of(self, rank: int) -> list[str]:
        """The tensors of which a rank writes its shard."""
        return [item.index.fqn for item in self._by_rank[rank].items]

    def index(self, files: dict[str, ShardFile], numbers: dict[str, Any]) -> StateIndex:
        """Returns the index that is written beside the files when every rank has written."""
        specs: dict[str, TensorSpec] = {}
        parts: dict[str, list[Part]] = {}
        for rank, plan in enumerate(self._by_rank):
            for item in plan.items:
                data = item.tensor_data
                assert data is not None
                specs[item.index.fqn] = TensorSpec(data.properties.dtype, tuple(data.size))
                part = Part(tuple(data.chunk.offsets), tuple(data.chunk.sizes), shard_name(rank))
                parts.setdefault(item.index.fqn, []).append(part)
        return StateIndex(specs, parts, files, numbers)


def _specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}


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
