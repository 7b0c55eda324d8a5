"""How an engine's training state lies on disk: tensors in safetensors files, everything else in one JSON file.

rank_N.safetensors   the shards that rank N wrote, under the tensors' names
index.json           where every part of every tensor is, the hash of each, and the numbers beside the tensors

Nothing is pickled, so nothing that is read can execute; torch's own files of distributed checkpoints (`.metadata`) can.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.config import DamagedError, ModelError
from shardwise.engine.files.safetensors_file import (
    DTYPE_NAMES,
    NAME_OF_DTYPE,
    SafetensorsReader,
    SafetensorsWriter,
    TensorSpec,
    differences,
)
from shardwise.engine.files.verified_files import bytes_hash, check_size, read_sealed_json, write_sealed_json

INDEX = "index.json"
FORMAT = 1
"""Version of the format, increased when what was written before can no longer be read."""


_SHARD = re.compile(r"rank_(\d+)\.safetensors")


def shard_name(rank: int) -> str:
    return f"rank_{rank}.safetensors"


def deal(names: Collection[str], num_ranks: int) -> list[list[str]]:
    """Returns, by rank, the shares of files that ranks read together, each file once. A shard belongs to the rank with
    its writer's number, which resumes from it if the layout is the same, so that its host reads it once; the other
    files are dealt out in turn."""
    writers = {name: int(shard[1]) for name in sorted(names) if (shard := _SHARD.fullmatch(Path(name).name))}
    others = sorted(set(names) - writers.keys())
    shares = [list[str]() for _ in range(num_ranks)]
    for name, writer in writers.items():
        shares[writer % num_ranks].append(name)
    return [share + others[rank::num_ranks] for rank, share in enumerate(shares)]


def own_share(names: Collection[str]) -> list[str]:
    """Returns this rank's share, as `deal` gives it, of file names or paths that are the same on every rank."""
    return deal(names, dist.get_world_size())[dist.get_rank()]


def shard_files(folder: Path) -> list[Path]:
    """The tensor files of every state in the folder and in those within it."""
    return [path for index in folder.rglob(INDEX) for path in index.parent.glob("rank_*.safetensors")]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, as one file holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True)
class ShardFile:
    """What shows where a safetensors file was changed: hashes of header and tensors, which together cover every
    byte."""

    num_bytes: int
    header_xxh3: str
    tensor_xxh3: dict[str, str]

    @classmethod
    def write(cls, path: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> Self:
        """Writes a file durably, tensor by tensor, from any device. Raises OSError."""
        writer = SafetensorsWriter(path, specs)
        hashes = {}
        try:
            for name, tensor in tensors:
                digest = xxhash.xxh3_64()
                writer.write(name, tensor, seen=digest.update)
                hashes[name] = digest.hexdigest()
            writer.close()
        except (OSError, ModelError):
            writer.abandon()
            raise
        return cls(path.stat().st_size, bytes_hash(writer.header), hashes)

    @classmethod
    def of(cls, path: Path) -> Self:
        """Reads a whole file. Raises ModelError: it cannot be read, or is not a safetensors file."""
        with closing(SafetensorsReader(path)) as file:
            return cls(path.stat().st_size, bytes_hash(file.header), _tensor_hashes(file))

    def check(self, path: Path, *, tensors: Mapping[str, str] | None = None) -> None:
        """Verifies a file by reading all of it. Raises DamagedError, ModelError as `open` and `require_hash`."""
        with closing(self.open(path, tensors=tensors)) as file:
            for name, found in _tensor_hashes(file).items():
                self.require_hash(path, name, found)

    def open(self, path: Path, *, tensors: Mapping[str, str] | None = None) -> SafetensorsReader:
        """Opens a file for reading tensors whose hashes are to be compared. Raises DamagedError: it is missing, cut, or
        has another header. ModelError: it cannot be opened.

        Args:
            tensors: dtype and shape of each tensor, as from `described`, if they are recorded: the error about a whole
                file with other tensors, such as the weights in another dtype, then says what differs. The hash of the
                header only says that it is another one.
        """
        changed = f"{path} is damaged: its header is not the one that was written"
        try:
            reader = SafetensorsReader(path)
        except DamagedError:
            check_size(path, self.num_bytes)
            raise DamagedError(changed) from None
        try:
            if tensors is not None and (problems := differences(tensors, described(reader))):
                raise DamagedError(f"{changed}: {problems}")
            check_size(path, self.num_bytes)
            if bytes_hash(reader.header) != self.header_xxh3:
                raise DamagedError(changed)
        except ModelError:
            reader.close()
            raise
        return reader

    def require_hash(self, path: Path, name: str, xxh3: str) -> None:
        """Raises DamagedError: the bytes of a tensor, of which this is the hash, are not those that were written."""
        if xxh3 != self.tensor_xxh3[name]:
            raise DamagedError(f"{path} is damaged: {name} is not what was written (xxh3)")


def described(file: SafetensorsReader) -> dict[str, str]:
    """Name -> dtype and shape of every tensor, such as "bfloat16 [4]"."""
    return {name: str(spec) for name, spec in file.specs.items()}


def _tensor_hashes(file: SafetensorsReader) -> dict[str, str]:
    """Name -> hash of every tensor, computed in as many threads as torch computes with."""
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return dict(zip(file.specs, threads.map(partial(_tensor_hash, file), file.specs), strict=True))


def _tensor_hash(file: SafetensorsReader, name: str) -> str:
    digest = xxhash.xxh3_64()
    for block in file.blocks(name):
        digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class StateIndex:
    """What index.json says."""

    specs: dict[str, TensorSpec]
    """Name -> dtype and shape of the whole tensor."""
    parts: dict[str, list[Part]]
    """Name -> parts that make up the tensor without overlap."""
    files: dict[str, ShardFile]
    numbers: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the index of a state. Raises ModelError: there is none, it is damaged, or of another version of
        Shardwise."""
        content = read_sealed_json(folder / INDEX)
        if content["format"] != FORMAT:
            raise ModelError(
                f"{folder / INDEX} has format {content['format']}, and this version of Shardwise reads {FORMAT}; load "
                "it with the version that wrote it"
            )
        tensors = content["tensors"]
        index = cls(
            specs={
                name: TensorSpec(DTYPE_NAMES[tree["dtype"]], tuple(tree["shape"])) for name, tree in tensors.items()
            },
            parts={name: [_part(part) for part in tree["parts"]] for name, tree in tensors.items()},
            files={name: ShardFile(**tree) for name, tree in content["files"].items()},
            numbers=content["numbers"],
        )
        for name, forms in index._described.items():
            if name not in index.files or forms.keys() != index.files[name].tensor_xxh3.keys():
                raise DamagedError(f"{folder / INDEX} is damaged: it lists other tensors than hashes of {name}")
        return index

    def write(self, folder: Path) -> None:
        """Writes the index durably, whole or not at all. Raises OSError."""
        tensors = {
            name: {
                "dtype": NAME_OF_DTYPE[spec.dtype],
                "shape": list(spec.shape),
                "parts": [asdict(part) for part in self.parts[name]],
            }
            for name, spec in self.specs.items()
        }
        files = {name: asdict(file) for name, file in self.files.items()}
        content = {"format": FORMAT, "numbers": self.numbers, "files": files, "tensors": tensors}
        write_sealed_json(folder / INDEX, content)

    def check(self, path: Path) -> None:
        """Verifies one of `files`. Raises DamagedError: it is missing, cut or changed, or has other parts than it
        should have; names the tensor. ModelError: it cannot be opened."""
        self.files[path.name].check(path, tensors=self._described.get(path.name, {}))

    def open(self, path: Path) -> SafetensorsReader:
        """Opens one of `files` for reading tensors whose hashes are to be compared. Raises DamagedError: it is missing,
        cut, or has other parts than it should have. ModelError: it cannot be opened."""
        return self.files[path.name].open(path, tensors=self._described.get(path.name, {}))

    def part_of(self, name: str, offsets: Sequence[int] | None) -> Part:
        """The part of a tensor that begins at the offsets."""
        assert offsets is not None
        return self._parts_by_offsets[name][tuple(offsets)]

    def metadata(self) -> Metadata:
        """Returns the index as the planners of torch.distributed.checkpoint take it."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=spec.dtype),
                    torch.Size(spec.shape),
                    [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in self.parts[name]],
                )
                for name, spec in self.specs.items()
            }
        )

    @cached_property
    def _described(self) -> dict[str, dict[str, str]]:
        """File -> name of a tensor -> dtype and shape of the part in the file."""
        found: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for name, parts in self.parts.items():
            for part in parts:
                found[part.file][name] = str(TensorSpec(self.specs[name].dtype, part.sizes))
        return dict(found)

    @cached_property
    def _parts_by_offsets(self) -> dict[str, dict[tuple[int, ...], Part]]:
        return {name: {part.offsets: part for part in parts} for name, parts in self.parts.items()}


def _part(tree: dict[str, Any]) -> Part:
    return Part(tuple(tree["offsets"]), tuple(tree["sizes"]), tree["file"])
