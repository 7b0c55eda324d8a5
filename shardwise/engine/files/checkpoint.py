"""The training state of an engine, saved and loaded on any layout: `state_plan` says which rank writes what, and
`state_files` defines the files.

Saved are the masters of the trained parameters, the optimizer's states and the numbers beside them, but not frozen
parameters, which are those of the model folder.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from operator import call
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from shardwise.config import DamagedError, ModelError
from shardwise.durable import fsync_folder
from shardwise.engine.agreement import raised_on_every_rank, written_on_every_rank
from shardwise.engine.exchange import all_gather_json, gather_json
from shardwise.engine.files.safetensors_file import SafetensorsReader, TensorSpec, differences
from shardwise.engine.files.staging import Copies, StagingBuffers
from shardwise.engine.files.state_files import Cut, ShardFile, StateIndex, own_share, shard_name
from shardwise.engine.files.state_plan import planned_cuts
from shardwise.engine.optim.optimizer import BEGIN_WITHOUT_STATE, MASTER, ShardedOptimizer
from shardwise.engine.shards import RowSharding, local_shard, num_rows_of
from shardwise.ops import nonfinite_names, on_current_stream

MAX_THREADS = 8
"""Most threads that read at the same time."""
PIECE_BYTES = 1 << 26
"""Bytes that a thread holds on the host of a tensor that goes to another device."""


def save_state(optimizer: ShardedOptimizer, folder: Path, *, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Collective. Writes what training resumes from; one copy of a shard that several ranks hold.

    Args:
        folder: on a file system that all ranks see; what is there is overwritten.
        meanwhile: called while a thread writes this rank's file; may be collective, and must not change the state.
    Raises:
        ExportError: on every rank, if a rank could not write. Whatever `meanwhile` raises, when the file is written.
    """
    state = StagedState.of(optimizer)
    with written_on_every_rank(folder):
        if dist.get_rank() == 0:  # the others find it there, unless they see another file system
            folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(1, thread_name_prefix="state") as thread:
        writing = thread.submit(on_current_stream(partial(state.write, folder), state.device))
        meanwhile()
    file: ShardFile | None = None
    with written_on_every_rank(folder):
        file = writing.result()
    files = gather_json(None if file is None else asdict(file))
    with written_on_every_rank(folder):
        if dist.get_rank() == 0:
            state.finish(folder, [None if tree is None else ShardFile(**tree) for tree in files])


@dataclass(frozen=True, slots=True)
class StagedState:
    """A training state on its way into a folder."""

    _specs: dict[str, TensorSpec]
    """Of the whole tensors."""
    _cuts: dict[str, Cut]
    _mine: dict[str, Tensor]
    """Parts of tensors that this rank writes."""
    _numbers: dict[str, Any]
    _rank: int
    _copies: Copies | None

    @classmethod
    @torch.no_grad()
    def of(cls, optimizer: ShardedOptimizer, buffers: StagingBuffers | None = None) -> Self:
        """Stages the state of an optimizer. With `buffers` it is the state as of now, and the optimizer may go on once
        their copies are made; without them it must be written before the next step."""
        tensors, rank = optimizer.named_tensors(), dist.get_rank()
        specs, cuts = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, planned_cuts(tensors)
        mine = {name: local_shard(tensors[name]) for name, cut in cuts.items() if shard_name(rank) in cut.by_file}
        if buffers is not None:
            mine = {name: buffers.copy(name, tensor) for name, tensor in mine.items()}
        return cls(specs, cuts, mine, optimizer.numbers(), rank, None if buffers is None else buffers.copies)

    @property
    def device(self) -> torch.device:
        """Device of its tensors, ignoring those on the host; the CPU if all are there."""
        devices = (tensor.device for tensor in self._mine.values())
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    def nonfinite_names(self) -> list[str]:
        """Names of the masters (by the weight's name) and states (`exp_avg/NAME`) whose part on this rank holds NaN or
        an infinity."""
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
        """Writes the index; called on one rank when every rank has written. `files` is what `write` returned, by rank.
        Raises OSError, also if a file does not have the size that its rank has written."""
        written = {shard_name(rank): file for rank, file in enumerate(files) if file is not None}
        for name, file in written.items():
            if (num_bytes := (folder / name).stat().st_size) != file.num_bytes:
                raise OSError(f"{folder / name} has {num_bytes:,} bytes, and its rank has written {file.num_bytes:,}")
        StateIndex(self._specs, self._cuts, written, self._numbers).write(folder)
        fsync_folder(folder)

    def _finish_copies(self) -> None:
        if self._copies is not None:
            self._copies.finish()


@torch.no_grad()
def load_state(optimizer: ShardedOptimizer, folder: Path, *, into_empty: bool = False, verify: bool = True) -> None:
    """Collective. Takes over what `save_state` wrote on any number of ranks; each rank reads its own shards.

    Every file is verified, and every name, shape and dtype compared, before a weight is changed. If there are no
    weights yet and every rank reads whole shards, files are read only once and hashed on the way.

    Args:
        into_empty: the masters have memory but no values yet, and may hold anything after an error.
        verify: whether hashes are compared; False serves to measure what they cost.
    Raises:
        DamagedError: on every rank: a file is missing or damaged; names it, and the tensor. ModelError: on every rank:
            a file cannot be read, or the state is that of other parameters or of another optimizer. An optimizer that
            had no states before has none after an error.
    """
    with raised_on_every_rank(ModelError, DamagedError):
        index = StateIndex.read(folder)
        optimizer.check_numbers(index.numbers)
        tensors = optimizer.named_tensors()
        compared = _with_states(tensors) & _with_states(index.specs)
        _require_same(folder, tensors, index, lambda name: name.startswith(MASTER) or _parameter(name) in compared)
    if verify and not into_empty:
        _verify_files(index, folder)
    is_new = not optimizer.has_states
    if not is_new:
        optimizer.drop_states()  # also those of parameters that had none when this was saved
    optimizer.create_states(_with_states(index.specs))
    try:
        with raised_on_every_rank(ModelError):
            tensors = optimizer.named_tensors()
            _require_same(folder, tensors, index)
            reads = list(_planned_reads(tensors, index))
        if verify and into_empty and not all(all_gather_json(all(read.is_of_whole_part for read in reads))):
            _verify_files(index, folder)
        with raised_on_every_rank(ModelError, DamagedError):
            _for_each(reads, index, folder, partial(_read, index, verify=verify))
    except ModelError:
        if is_new:
            optimizer.drop_states()
        raise
    optimizer.load_numbers(index.numbers)


def read_numbers(optimizer: ShardedOptimizer, folder: Path) -> dict[str, Any]:
    """Collective. Reads the numbers that `save_state` wrote beside the tensors, for `optimizer.load_numbers`; the
    number of steps, on which the learning rate depends, is one. Raises ModelError as `load_state`."""
    with raised_on_every_rank(ModelError):
        index = StateIndex.read(folder)
        optimizer.check_numbers(index.numbers)
    return index.numbers


def _verify_files(index: StateIndex, folder: Path) -> None:
    """Collective. Reads this rank's share of the files, so that the ranks together read each once."""
    with raised_on_every_rank(ModelError, DamagedError):
        for name in own_share(index.files):
            index.check(folder / name)


def _parameter(name: str) -> str:
    """The parameter that a master or a state belongs to, from its name in a training state."""
    return name.partition("/")[2]


def _with_states(names: Iterable[str]) -> set[str]:
    """The parameters that have optimizer states beside their masters."""
    return {_parameter(name) for name in names if not name.startswith(MASTER)}


def _require_same(
    folder: Path,
    tensors: Mapping[str, Tensor],
    index: StateIndex,
    is_compared: Callable[[str], bool] = lambda name: True,
) -> None:
    """Raises ModelError unless the stored tensors that are compared match the engine's in name, shape and dtype."""
    wanted = {name: TensorSpec.of(tensor) for name, tensor in tensors.items() if is_compared(name)}
    stored = {name: spec for name, spec in index.specs.items() if is_compared(name)}
    if problems := differences(wanted, stored):
        raise ModelError(
            f"{folder} is not the state of this engine: {problems}; resume with the model, the optimizer (adamw_8bit: "
            f"on as many ranks), the dtypes and the adapters that it was saved with, {BEGIN_WITHOUT_STATE}"
        )


@dataclass(frozen=True, slots=True)
class _Read:
    """A box of a stored part, and where it goes."""

    name: str
    file: str
    box: list[slice]
    is_of_whole_part: bool
    target: Tensor
    """Where the box goes, on any device."""

    @property
    def is_direct(self) -> bool:
        """Whether the file system can read straight into the target."""
        return self.target.device.type == "cpu" and self.target.is_contiguous()

    def run(self, file: SafetensorsReader, seen: Callable[[memoryview], object] = lambda block: None) -> None:
        """Reads the box into the target; `seen` gets the bytes in their order. Raises ModelError: they cannot be
        read."""
        if self.is_direct:
            file.read_into(self.target, self.name, self.box, seen=seen)
            return
        for box, target in self._pieces():
            value = torch.empty(target.shape, dtype=target.dtype)
            file.read_into(value, self.name, box, seen=seen)
            target.copy_(value)

    def _pieces(self) -> Iterator[tuple[list[slice], Tensor]]:
        """Yields (box, target) of the rows that are on the host at the same time."""
        if not self.box or not self.target.numel():
            yield self.box, self.target
            return
        rows, *others = self.box
        num_rows = max(1, PIECE_BYTES * len(self.target) // self.target.nbytes)
        for start in range(0, len(self.target), num_rows):
            target = self.target[start : start + num_rows]
            yield [slice(rows.start + start, rows.start + start + len(target)), *others], target


def _planned_reads(tensors: dict[str, Tensor], index: StateIndex) -> Iterator[_Read]:
    """Yields what this rank reads."""
    for name, tensor in tensors.items():
        sharding, shard = RowSharding.of(tensor), local_shard(tensor)
        mine = sharding.rows(num_rows_of(tensor.shape), sharding.rank)
        for part in index.cuts[name].parts_of(mine):
            if not tensor.dim():
                yield _Read(name, part.file, [], True, shard)
                continue
            start, stop = max(part.start, mine.start), min(part.stop, mine.stop)
            box = [slice(start - part.start, stop - part.start), *(slice(0, size) for size in tensor.shape[1:])]
            is_whole = (start, stop) == (part.start, part.stop)
            yield _Read(name, part.file, box, is_whole, shard[start - mine.start : stop - mine.start])


def _read(index: StateIndex, read: _Read, file: SafetensorsReader, *, verify: bool) -> None:
    """Reads a box, and verifies the hash on the way if it is a whole part. Raises DamagedError: the hash differs."""
    if not (verify and read.is_of_whole_part):
        read.run(file)
        return
    digest = xxhash.xxh3_64()
    read.run(file, digest.update)
    index.files[read.file].require_hash(file.path, read.name, digest.hexdigest())


def _for_each(
    reads: Sequence[_Read], index: StateIndex, folder: Path, work: Callable[[_Read, SafetensorsReader], object]
) -> None:
    """Calls `work` with every read and its open file, file by file, in a few threads: at least two, so that one may
    wait for the disk."""
    by_file: defaultdict[str, list[_Read]] = defaultdict(list)
    for read in reads:
        by_file[read.file].append(read)
    with ThreadPoolExecutor(min(MAX_THREADS, max(2, torch.get_num_threads()))) as threads:
        for name, own in by_file.items():
            with closing(index.open(folder / name)) as file:
                calls = [on_current_stream(partial(work, read, file), read.target.device) for read in own]
                list(threads.map(call, calls))
