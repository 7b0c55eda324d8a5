"""Checkpoints of verl's FSDP workers: for every rank one file of torch.save with its shards of the state dict.

model_world_size_W_rank_R.pt    name -> DTensor (FSDP2, or FSDP1 with a mesh) or ShardedTensor (FSDP1)
optim_world_size_W_rank_R.pt    the optimizer's state_dict: the same kinds of tensors by the parameter's number
extra_state_world_size_W_rank_R.pt    learning-rate schedule and random generators, which are not read
fsdp_config.json                FSDP_version and world_size, in later versions
huggingface/                    config.json and tokenizer

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py. No process group is needed: a rank's place in the mesh is
pickled with its DTensors.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from transformers import PreTrainedModel

from shardwise.config import ConfigError, ModelError
from shardwise.console import counted, listed
from shardwise.engine.files.foreign.found_weights import FoundWeights
from shardwise.engine.files.foreign.pickles import Record, attributes_of
from shardwise.engine.files.foreign.tensors import Piece, ShardedTensor, ShardedTensors
from shardwise.engine.files.foreign.torch_file import StoredTensor, TorchFile
from shardwise.engine.files.safetensors_file import TensorSpec

_RANK_FILE = re.compile(r"(?P<part>model|optim)_world_size_(?P<size>\d+)_rank_(?P<rank>\d+)\.pt")
_RECORDS = (
    "torch._tensor._rebuild_from_type_v2",
    "torch._utils._rebuild_wrapper_subclass",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._mesh_layout._MeshLayout",
    "torch.distributed._mesh_layout._FlatLayout",
    # since torch 2.5
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.ShardOrderEntry",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "torch.distributed.tensor.placement_types.Partial",
    "torch.distributed.tensor.placement_types.Replicate",
    "torch.distributed.tensor.placement_types.Shard",
    "torch.distributed.tensor.placement_types._StridedShard",
    # before
    "torch.distributed._tensor.api.DTensor",
    "torch.distributed._tensor._dtensor_spec.DTensorSpec",
    "torch.distributed._tensor._dtensor_spec.TensorMeta",
    "torch.distributed._tensor.placement_types.DTensorSpec",
    "torch.distributed._tensor.placement_types.TensorMeta",
    "torch.distributed._tensor.placement_types.Partial",
    "torch.distributed._tensor.placement_types.Replicate",
    "torch.distributed._tensor.placement_types.Shard",
    # FSDP1 without a mesh
    "torch.distributed._shard.metadata.ShardMetadata",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.shard.Shard",
    "torch.distributed._shard.sharding_spec.api.EnumerableShardingSpec",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    "torch.distributed.remote_device._remote_device",
)
"""What the pickles name in the versions of torch from 2.2 on."""


@dataclass(frozen=True, slots=True)
class _Shards:
    """What one rank holds of one tensor."""

    spec: TensorSpec
    """Dtype and shape of the whole tensor."""
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class VerlCheckpoint:
    """What the files of all ranks hold, before weights are read. See `ForeignCheckpoint`.

    Example: `VerlCheckpoint(folder=.../global_step_40/actor, world_size=4, mesh={"ddp": 2, "fsdp": 2}, ...)`
    """

    FILES: ClassVar[str] = "model_world_size_W_rank_R.pt files, which verl writes into global_step_N/actor"

    folder: Path
    world_size: int
    mesh: dict[str, int]
    """Axis -> size."""
    tensors: ShardedTensors
    """The model's tensors."""
    fsdp_version: int | None
    """The version in fsdp_config.json; None without that file."""

    @staticmethod
    def find(source: Path) -> Path | None:
        """The folder of the ranks' files: `source`, or `actor/` in it."""
        return next((path for path in (source, source / "actor") if list(path.glob("model_world_size_*.pt"))), None)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Reads what every rank holds, and no weights yet.

        Raises:
            ModelError: a rank's file is missing, cut or asks to run code, the files are of runs of different sizes, or
                tensors are sharded in a way that is not FSDP's.
        """
        files = _rank_files(folder, "model")
        config = _fsdp_config(folder, len(files))
        by_rank = [_state_dict(file) for file in files]
        with _known_forms(folder):
            mesh = _Mesh.of(folder, by_rank)
            return cls(folder, len(files), mesh.axes, _tensors(files, by_rank, mesh), config.get("FSDP_version"))

    def has(self, part: str) -> bool:
        """Whether there are files of a part, such as optim or extra_state."""
        return any(self.folder.glob(f"{part}_world_size_*.pt"))

    @property
    def title(self) -> str:
        """See ForeignCheckpoint."""
        version = "" if self.fsdp_version is None else f" (FSDP{self.fsdp_version})"
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        return f"verl{version}, {counted(self.world_size, 'rank')}, mesh {mesh}"

    def find_weights(self, model: PreTrainedModel, prefix: str | None) -> FoundWeights:
        """See ForeignCheckpoint. There is nothing but the model. Raises ConfigError: a prefix is given."""
        if prefix is not None:
            raise ConfigError(
                f"--prefix={prefix} has no effect on verl's files, which hold nothing but the model; remove it"
            )
        return FoundWeights("", self.tensors, [])

    def optimizer_states(self, parameters: Sequence[str], weights: FoundWeights) -> dict[str, ShardedTensor]:
        """See ForeignCheckpoint. The parameters are numbered in the order of the modules. Raises ModelError: also for
        the states of FSDP1, which are those of flattened parameters."""
        files = _rank_files(self.folder, "optim")
        by_rank = [_numbered_states(file, parameters) for file in files]
        with _known_forms(self.folder):
            return dict(_tensors(files, by_rank, _Mesh(self.mesh)).tensors)

    def left_out(self, weights: FoundWeights, states: Collection[ShardedTensor]) -> list[str]:
        """See ForeignCheckpoint."""
        optimizer = ["the optimizer (--config takes it over)"] if not states and self.has("optim") else []
        extra = ["extra_state files (schedule, random generators)"] if self.has("extra_state") else []
        return [*optimizer, *extra]


@dataclass(frozen=True, slots=True)
class _Mesh:
    """The grid of ranks, put together from the places that they name."""

    axes: dict[str, int]

    @classmethod
    def of(cls, folder: Path, by_rank: Sequence[Mapping[str, Any]]) -> Self:
        """Raises ModelError: the ranks' places do not make up a grid."""
        meshes = [next((_mesh(value) for value in state.values() if _is_dtensor(value)), None) for state in by_rank]
        places = [mesh["_coordinate_on_dim"] for mesh in meshes if mesh is not None]
        if not places:
            return cls({"fsdp": len(by_rank)})
        sizes = [max(indices) + 1 for indices in zip(*places, strict=True)]
        if len({tuple(place) for place in places}) != len(by_rank) or math.prod(sizes) != len(by_rank):
            raise ModelError(
                f"{folder} holds files of {len(by_rank)} ranks, and by what is in them their mesh is "
                f"{' x '.join(map(str, sizes))}; bring back the files of one save, under the names that verl gave them"
            )
        first = next(mesh for mesh in meshes if mesh is not None)
        names = first.get("_mesh_dim_names") or first.get("mesh_dim_names") or range(len(sizes))
        return cls({str(name): size for name, size in zip(names, sizes, strict=True)})


@contextmanager
def _known_forms(folder: Path) -> Iterator[None]:
    """Turns the error of a record that lacks something into a ModelError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(
            f"{folder} holds shards in a form that is not known ({type(error).__name__}: {error}); save them with "
            "torch 2.2 or newer"
        ) from None


def _rank_files(folder: Path, part: str) -> list[Path]:
    """Returns the files of a part, by rank. Raises ModelError: they are of several world sizes, or not there for every
    rank."""
    matches = [
        match for path in folder.iterdir() if (match := _RANK_FILE.fullmatch(path.name)) and match["part"] == part
    ]
    sizes = sorted({int(match["size"]) for match in matches})
    if not sizes:
        raise ModelError(f"{folder} holds no {part}_world_size_W_rank_R.pt files; copy those of all ranks there")
    if len(sizes) > 1:
        raise ModelError(
            f"{folder} holds {part} files of the world sizes {' and '.join(map(str, sizes))}, so of different saves; "
            "move those of one of them elsewhere"
        )
    files = [folder / f"{part}_world_size_{sizes[0]}_rank_{rank}.pt" for rank in range(sizes[0])]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(
            f"{folder} lacks {listed(missing)}; every rank writes a file, on its own node: copy all of them"
        )
    return files


def _fsdp_config(folder: Path, world_size: int) -> dict[str, Any]:
    path = folder / "fsdp_config.json"
    if not path.is_file():
        return {}
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}; copy it again, or remove it") from None
    if config.get("world_size", world_size) != world_size:
        raise ModelError(
            f"{path} says world_size {config['world_size']}, and the files' names say {world_size}; bring back the "
            "files of one save"
        )
    return config


def _state_dict(file: Path) -> dict[str, Any]:
    content = TorchFile(file, records=_RECORDS).content
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ModelError(f"{file} does not hold a state dict; give the folder that verl's workers wrote")
    return content


def _numbered_states(file: Path, parameters: Sequence[str]) -> dict[str, Any]:
    """Returns what one rank holds of the optimizer's states, by "KEY/NAME"."""
    content = TorchFile(file, records=_RECORDS).content
    try:
        groups = content["param_groups"]
        numbers = sorted(number for group in groups for number in group["params"])
        states = [
            (parameters[number], key, value) for number, keys in content["state"].items() for key, value in keys.items()
        ]
    except (KeyError, TypeError, IndexError, AttributeError):
        groups, numbers, states = [], [], []
    if len(groups) > 1:  # torch numbers them group by group, and which parameters a group has is not written down
        raise ModelError(
            f"{file} has {len(groups)} parameter groups, and nothing in it says which parameters are in which; import "
            "the weights without --config"
        )
    if numbers != list(range(len(parameters))) or not states:
        raise ModelError(
            f"{file} does not hold AdamW's states for {len(parameters)} parameters; those of FSDP1, which flattens "
            "parameters, and of optimizers over a part of the model cannot be taken over"
        )
    return {f"{key}/{name}": value for name, key, value in states}


def _tensors(files: Sequence[Path], by_rank: Sequence[Mapping[str, Any]], mesh: _Mesh) -> ShardedTensors:
    """Puts tensors together from what every rank holds. Raises ModelError: it does not fit together."""
    folder, tensors = files[0].parent, {}
    for file, state in zip(files, by_rank, strict=True):
        if different := sorted(state.keys() ^ by_rank[0].keys()):
            raise ModelError(
                f"{file} and {files[0].name} hold different tensors ({listed(different)}); bring back the files "
                "of one save"
            )
    for name in by_rank[0]:
        shards = [_shards(f"{file}: {name}", state[name], mesh) for file, state in zip(files, by_rank, strict=True)]
        if len({one.spec for one in shards}) > 1:
            raise ModelError(f"{folder}: the ranks do not agree on what {name} is; bring back the files of one save")
        pieces = [piece for one in shards for piece in one.pieces]
        tensors[name] = ShardedTensor.of(name, shards[0].spec, pieces, origin=folder)
    return ShardedTensors(folder, tensors)


def _shards(origin: str, value: Any, mesh: _Mesh) -> _Shards:
    """Returns what one rank holds of a tensor. Raises ModelError: it is neither a tensor nor a shard as FSDP makes
    them."""
    if isinstance(value, StoredTensor):  # whole on every rank
        return _Shards(value.spec, [Piece((0,) * len(value.spec.shape), value.spec.shape, value.read)])
    if isinstance(value, Record) and value.kind == "_rebuild_from_type_v2":
        _, wrapper, _, state = value.args
        if wrapper.kind == "DTensor":
            return _dtensor_shards(origin, attributes_of(state), list(mesh.axes.values()))
        if wrapper.kind == "ShardedTensor":
            return _sharded_tensor_shards(origin, *state[:2])
    raise ModelError(f"{origin} is neither a tensor nor a shard of one; give the state dict that verl's workers wrote")


def _dtensor_shards(origin: str, dtensor: dict[str, Any], mesh_sizes: list[int]) -> _Shards:
    local, spec = dtensor["_local_tensor"], dtensor["_spec"].attributes
    place = spec["mesh"].attributes["_coordinate_on_dim"]
    shape, _, dtype = spec["tensor_meta"].args
    offsets, sizes = [0] * len(shape), list(shape)
    for placement, index, num_ranks in zip(spec["placements"], place, mesh_sizes, strict=True):
        if placement.kind == "Replicate":
            continue
        if placement.kind != "Shard":
            raise ModelError(
                f"{origin} has the placement {placement.kind}, which FSDP alone does not make; merge its "
                "tensor-parallel shards where it was trained"
            )
        dim = placement.attributes["dim"]
        rows = -(-sizes[dim] // num_ranks)  # torch.chunk: equal rows, the last ranks fewer or none
        start = min(index * rows, sizes[dim])
        offsets[dim], sizes[dim] = offsets[dim] + start, min(rows, sizes[dim] - start)
    if local.spec != TensorSpec(dtype, tuple(sizes)):
        raise ModelError(
            f"{origin} is {local.spec}, and among {math.prod(mesh_sizes)} ranks this one should hold {sizes} of "
            f"{list(shape)}; bring back the files of one save, under the names that verl gave them"
        )
    return _Shards(TensorSpec(dtype, tuple(shape)), [Piece(tuple(offsets), tuple(sizes), local.read)])


def _sharded_tensor_shards(origin: str, local_shards: list[Record], metadata: Record) -> _Shards:
    """Reads the ShardedTensor that FSDP1 writes without a mesh. Raises ModelError: a shard is not what its metadata
    say."""
    held = [shard.attributes for shard in local_shards]
    boxes = [shard["metadata"].attributes for shard in held]
    whole = metadata.attributes
    dtype = whole["tensor_properties"].state[0]
    pieces = []
    for shard, box in zip(held, boxes, strict=True):
        local, sizes = shard["tensor"], tuple(box["shard_sizes"])
        if local.spec != TensorSpec(dtype, sizes):
            raise ModelError(
                f"{origin} is {local.spec}, and by its metadata it should be {TensorSpec(dtype, sizes)}; bring back "
                "the files of one save"
            )
        pieces.append(Piece(tuple(box["shard_offsets"]), sizes, local.read))
    return _Shards(TensorSpec(dtype, tuple(whole["size"])), pieces)


def _is_dtensor(value: Any) -> bool:
    return isinstance(value, Record) and value.kind == "_rebuild_from_type_v2" and value.args[1].kind == "DTensor"


def _mesh(dtensor: Record) -> dict[str, Any]:
    mesh: Record = attributes_of(dtensor.args[3])["_spec"].attributes["mesh"]
    return mesh.attributes
