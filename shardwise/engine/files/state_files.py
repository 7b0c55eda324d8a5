"""How an engine's training state lies on disk: tensors in safetensors files, everything else in one JSON file.

rank_N.safetensors   the shards that rank N wrote, under the tensors' names
index.json           where every part of every tensor is, the hash of each, and the numbers beside the tensors

Nothing is pickled, so nothing that is read can execute; torch's own files of distributed checkpoints (`.metadata`) can.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

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
from shardwise.engine.shards import num_rows_of

INDEX = "index.json"
FORMAT = 2
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


class Part(NamedTuple):
    """Rows of a tensor, as one file holds them; see `num_rows_of`."""

    start: int
    stop: int
    file: str


@dataclass(frozen=True, eq=False)
class Cut:
    """Into which parts a tensor is cut. Most tensors of one state share a cut with others: there are thousands of them,
    and as many parts of each as ranks."""

    parts: tuple[Part, ...]
    """In the order of their rows."""

    def parts_of(self, rows: range) -> Iterator[Part]:
        """Yields the parts that hold some of these rows, in their order."""
        if rows:
            first = bisect_right(self.parts, rows.start, key=attrgetter("stop"))
            yield from takewhile(lambda part: part.start < rows.stop, self.parts[first:])

    def is_of(self, shape: Sequence[int]) -> bool:
        """Whether the parts make up a tensor of this shape without overlap."""
        return self._num_rows == num_rows_of(shape)

    @cached_property
    def by_file(self) -> dict[str, Part]:
        """Name of a file -> the part in it."""
        return {part.file: part for part in self.parts}

    @cached_property
    def _num_rows(self) -> int | None:
        """None where parts overlap, rows are in none of them, or two parts in one file."""
        stops = [0, *(part.stop for part in self.parts)]
        are_in_order = stops == sorted(stops) and [part.start for part in self.parts] == stops[:-1]
        return stops[-1] if are_in_order and len(self.by_file) == len(self.parts) else None


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
    cuts: dict[str, Cut]
    files: dict[str, ShardFile]
    numbers: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the index of a state. Raises ModelError: there is none, it is damaged, or of another version of
        Shardwise."""
        content = read_sealed_json(folder / INDEX)
        try:
            if content["format"] != FORMAT:
                raise ModelError(
                    f"{folder / INDEX} has format {content['format']}, and this version of Shardwise reads {FORMAT}; "
                    "load it with the version that wrote it"
                )
            return cls._of_content(content)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DamagedError(
                f"{folder / INDEX} is damaged: it is not what was written ({type(error).__name__}: {error})"
            ) from None

    @classmethod
    def _of_content(cls, content: Any) -> Self:
        """Raises ValueError: the parts of a tensor are not all of it. Content of another form raises what Python makes
        of it."""
        cuts = {number: Cut(tuple(Part(*part) for part in parts)) for number, parts in enumerate(content["cuts"])}
        files = {name: ShardFile(**tree, tensor_xxh3={}) for name, tree in content["files"].items()}
        index = cls({}, {}, files, content["numbers"])
        for name, tree in content["tensors"].items():
            spec, cut = TensorSpec(DTYPE_NAMES[tree["dtype"]], tuple(tree["shape"])), cuts[tree["cut"]]
            index.specs[name], index.cuts[name] = spec, cut
            if not cut.is_of(spec.shape):
                raise ValueError(f"the parts of {name} are not all of it")
            for part, xxh3 in zip(cut.parts, tree["xxh3"].split(), strict=True):
                files[part.file].tensor_xxh3[name] = xxh3
        return index

    def write(self, folder: Path) -> None:
        """Writes the index durably, whole or not at all. Raises OSError."""
        places = {cut: place for place, cut in enumerate(dict.fromkeys(self.cuts.values()))}
        tensors = {
            name: {
                "dtype": NAME_OF_DTYPE[spec.dtype],
                "shape": spec.shape,
                "cut": places[self.cuts[name]],
                "xxh3": " ".join(self.files[part.file].tensor_xxh3[name] for part in self.cuts[name].parts),
            }
            for name, spec in self.specs.items()
        }
        files = {
            name: {"num_bytes": file.num_bytes, "header_xxh3": file.header_xxh3} for name, file in self.files.items()
        }
        content = {
            "format": FORMAT,
            "numbers": self.numbers,
            "files": files,
            "tensors": tensors,
            "cuts": [cut.parts for cut in places],
        }
        write_sealed_json(folder / INDEX, content)

    def check(self, path: Path) -> None:
        """Verifies one of `files`. Raises DamagedError: it is missing, cut or changed, or has other parts than it
        should have; names the tensor. ModelError: it cannot be opened."""
        self.files[path.name].check(path, tensors=self._described(path))

    def open(self, path: Path) -> SafetensorsReader:
        """Opens one of `files` for reading tensors whose hashes are to be compared. Raises DamagedError: it is missing,
        cut, or has other parts than it should have. ModelError: it cannot be opened."""
        return self.files[path.name].open(path, tensors=self._described(path))

    def _described(self, path: Path) -> dict[str, str]:
        """Name -> dtype and shape of every tensor's part in one of `files`."""
        parts = {name: cut.by_file[path.name] for name, cut in self.cuts.items() if path.name in cut.by_file}
        return {name: str(_spec_of(part, self.specs[name])) for name, part in parts.items()}


def _spec_of(part: Part, whole: TensorSpec) -> TensorSpec:
    return TensorSpec(whole.dtype, (part.stop - part.start, *whole.shape[1:])) if whole.shape else whole
