"""Folders of torch.distributed.checkpoint: `.metadata`, a pickle that says where every piece of every tensor is, and
`__R_K.distcp` files, which hold a file of torch.save for each piece, one after the other."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor
from transformers import PreTrainedModel

from shardwise.config import ModelError
from shardwise.console import counted, listed
from shardwise.engine.files.foreign.found_weights import FoundWeights, find_weights
from shardwise.engine.files.foreign.pickles import Record, read_pickle
from shardwise.engine.files.foreign.tensors import Piece, ShardedTensor, ShardedTensors
from shardwise.engine.files.foreign.torch_file import StoredTensor, TorchFile
from shardwise.engine.files.safetensors_file import TensorSpec

METADATA = ".metadata"
_RECORDS = (
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            *("Metadata", "StorageMeta", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
            *("TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    *(f"pathlib.{name}" for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *(f"pathlib._local.{name}" for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
)


@dataclass(frozen=True, slots=True)
class DcpCheckpoint:
    """What a folder holds, before a tensor is read. See `ForeignCheckpoint`."""

    FILES: ClassVar[str] = f"the {METADATA} file of torch.distributed.checkpoint"

    folder: Path
    num_files: int
    tensors: ShardedTensors
    """All of them: weights, optimizer states, whatever was saved."""
    others: list[str]
    """Names of entries that are not tensors; they were pickled and are not read."""

    @staticmethod
    def find(source: Path) -> Path | None:
        """See ForeignCheckpoint."""
        return source if (source / METADATA).is_file() else None

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Reads what the folder holds. Raises ModelError: `.metadata` is damaged, asks to run code or names a file that
        is not there."""
        path = folder / METADATA
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}; copy the folder again") from None
        metadata = read_pickle(data, str(path), records=_RECORDS)
        try:
            return cls._of(folder, metadata.attributes)
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            raise ModelError(
                f"{path} is not what torch.distributed.checkpoint writes ({type(error).__name__}: {error}); save it "
                "again with a newer torch"
            ) from None

    @classmethod
    def _of(cls, folder: Path, metadata: dict[str, Any]) -> Self:
        entries = {name: record.attributes for name, record in metadata["state_dict_metadata"].items()}
        places: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
        for index, info in metadata["storage_data"].items():
            named = index.attributes
            places[named["fqn"], tuple(named.get("offset") or ())] = info.attributes
        files = sorted({str(place["relative_path"]) for place in places.values()})
        if missing := [name for name in files if Path(name).name != name or not (folder / name).is_file()]:
            raise ModelError(
                f"{folder} lacks {listed(missing)}, which {METADATA} names; every rank writes a file, on its "
                "own node: copy all of them"
            )
        tensors = {name: _tensor(name, folder, entry, places) for name, entry in entries.items() if "chunks" in entry}
        others = [name for name in entries if name not in tensors]
        return cls(folder, len(files), ShardedTensors(folder, tensors), others)

    @property
    def title(self) -> str:
        """See ForeignCheckpoint."""
        return f"torch.distributed.checkpoint, {counted(self.num_files, 'file')}"

    def find_weights(self, model: PreTrainedModel, prefix: str | None) -> FoundWeights:
        """See ForeignCheckpoint."""
        return find_weights(self.tensors, model, prefix=None if prefix is None else self.tensors.meant_prefix(prefix))

    def optimizer_states(self, parameters: Sequence[str], weights: FoundWeights) -> dict[str, ShardedTensor]:
        """See ForeignCheckpoint. The optimizer was saved under the names of its parameters
        (`get_optimizer_state_dict`), beside the weights if there are several; empty if there is none."""
        prefix = self.tensors.prefix_of(parameters, suffix=".exp_avg", near=weights.prefix)
        if prefix is None:
            return {}
        named = {name.rpartition("."): state for name, state in self.tensors.under(prefix).tensors.items()}
        return {f"{key}/{name}": state for (name, _, key), state in named.items() if name in parameters}

    def left_out(self, weights: FoundWeights, states: Collection[ShardedTensor]) -> list[str]:
        """See ForeignCheckpoint. Names are counted by how they begin."""
        taken = {id(state) for state in states}
        tensors = [name for name in weights.left_out if id(self.tensors.tensors[name]) not in taken]
        depth = max(1, weights.prefix.count("."))
        groups = Counter(".".join(name.split(".")[:depth]) for name in [*tensors, *self.others])
        return [f"{group} ({count})" for group, count in groups.items()]


def _tensor(
    name: str, folder: Path, entry: dict[str, Any], places: Mapping[tuple[str, tuple[int, ...]], dict[str, Any]]
) -> ShardedTensor:
    properties: Record = entry["properties"]
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.attributes["dtype"]
    pieces = []
    for chunk in entry["chunks"]:
        offsets, sizes = (tuple(chunk.attributes[key]) for key in ("offsets", "sizes"))
        if 0 not in sizes:
            read = partial(_read, name, folder, places[name, offsets], TensorSpec(dtype, sizes))
            pieces.append(Piece(offsets, sizes, read))
    return ShardedTensor.of(name, TensorSpec(dtype, tuple(entry["size"])), pieces, origin=folder)


def _read(name: str, folder: Path, place: dict[str, Any], spec: TensorSpec) -> Tensor:
    path = folder / place["relative_path"]
    if place.get("transform_descriptors"):
        raise ModelError(f"{path}: {name} is stored compressed or otherwise transformed; save it without that")
    stored = TorchFile(path, start=place["offset"], num_bytes=place["length"]).content
    if not isinstance(stored, StoredTensor) or stored.spec != spec:
        found = stored.spec if isinstance(stored, StoredTensor) else "no tensor"
        raise ModelError(f"{path} holds {found} where {METADATA} says that {name} is {spec}; copy the folder again")
    return stored.read()
