"""Weight sync: every medium against what moves the same bytes bare, the bytes of a delta, and what checksums cost.

Sender and receiver are processes of one thread each. In every round these run one after the other: memcpy of all
tensors in the sender; a sync over shared memory; a bare gloo broadcast of as many bytes in equal buckets, two at a
time; a sync over a process group. A sync hashes every tensor on both sides, loads it into the receiver's own tensors,
hashes those again, compares receipts and commits. Beside them: a sync inside one process, between two real engines,
with and without checksums, whose cost is the time that it is shorter without. And on 2 and 4 ranks of FSDP: gathering
what each rank of an engine that is cut as many times needs, against gathering all on each.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import paired_ratios, report
from benchmarks.loading import MODELS, build_folder
from shardwise.checksum import checksum, checksums
from shardwise.config import EngineConfig, OptimizerConfig
from shardwise.controller.launch import STORE_VARIABLE
from shardwise.controller.process_group import Rank, process_group
from shardwise.engine import TrainEngine
from shardwise.memfd import SharedTensors
from shardwise.ops import is_finite
from shardwise.region import Region
from shardwise.rollout import EmbeddedEngine
from shardwise.transfer import (
    Assembly,
    DeltaDecoder,
    DeltaEncoder,
    ProcessGroupMedium,
    SharedMemoryMedium,
    pull_weights,
    push_weights,
    sync_local,
)
from shardwise.transfer.buckets import DEFAULT_BUCKET_BYTES

DTYPE = torch.bfloat16
CHANGED_SHARES = [0.0, 0.001, 0.01, 0.1, 0.3, 1.0]
TIMEOUT = timedelta(minutes=5)
SHAPES = [(32768, 1024)] + 8 * [
    (2048, 1024),
    (1024, 1024),
    (1024, 2048),
    (3072, 1024),
    (3072, 1024),
    (1024, 3072),
    (1024,),
]
"""290 MB in bfloat16: an embedding, and eight layers."""


class TensorSender:
    """The weights of a trainer that has gathered them already, so that only the medium is measured."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weights = {f"{index}": torch.randn(shape).to(DTYPE) for index, shape in enumerate(SHAPES)}

    def named_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()

    def change(self, share: float) -> None:
        """One bit of this share of every tensor's elements."""
        for tensor in self.weights.values():
            tensor.view(-1).view(torch.int16)[torch.rand(tensor.numel()) < share] ^= 1


class TensorReceiver:
    """Tensors of its own, and nothing that generates from them."""

    def __init__(self) -> None:
        self._weights = {f"{index}": torch.zeros(shape, dtype=DTYPE) for index, shape in enumerate(SHAPES)}
        self.memory = SharedTensors(self._weights.values())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if not tensor.is_set_to(self._weights[name]):
                self._weights[name].copy_(tensor)

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._weights.items()

    def served_checksums(self) -> Iterator[tuple[str, int | None]]:
        return checksums(self.served_weights())

    def commit_weights(self, version: int) -> None:
        pass


class Ends:
    """What one of the two processes does; both go through the same list."""

    def __init__(self, store_path: str, rank: int) -> None:
        store = dist.FileStore(store_path, 2)
        self.rank = rank
        self._bare: Any = dist.ProcessGroupGloo(dist.PrefixStore("bare", store), rank, 2, timeout=TIMEOUT)
        media: dict[str, Any] = {"shared_memory": SharedMemoryMedium, "process_group": ProcessGroupMedium}
        self._media = {
            name: medium.join(dist.PrefixStore(name, store), rank, 2, timeout=TIMEOUT) for name, medium in media.items()
        }
        self.sender, self._receiver = TensorSender(), TensorReceiver()
        self._encoder, self._decoder, self._assembly = DeltaEncoder(), DeltaDecoder(), Assembly()
        self._copies = {name: torch.empty_like(tensor) for name, tensor in self.sender.weights.items()}
        self._buckets = [torch.zeros(DEFAULT_BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]
        self.num_bytes = sum(tensor.nbytes for tensor in self.sender.weights.values())
        self._version = 0

    def memcpy(self) -> None:
        """Of all tensors, in the sender alone."""
        if self.rank == 0:
            for name, tensor in self.sender.weights.items():
                self._copies[name].copy_(tensor)

    def hash(self) -> None:
        """Of all tensors, in the sender alone."""
        if self.rank == 0:
            for tensor in self.sender.weights.values():
                checksum(tensor)

    def broadcast(self) -> None:
        """Bare, of equal buckets."""
        options = dist.BroadcastOptions()
        works: list[Any] = []
        options.rootRank, options.rootTensor = 0, 0
        for start in range(0, self.num_bytes, DEFAULT_BUCKET_BYTES):
            bucket = self._buckets[len(works) % 2][: self.num_bytes - start]
            if len(works) >= 2:
                works[-2].wait()
            works.append(self._bare.broadcast([bucket], options))
        for work in works:
            work.wait()

    def sync(self, medium: str, *, delta: bool = False) -> int:
        """Returns the bytes that travelled."""
        self._version += 1
        if self.rank == 0:
            encoder = self._encoder if delta else None
            receipt = push_weights(
                self.sender.named_weights(DTYPE), self._media[medium], version=self._version, delta=encoder
            )
        else:
            decoder = self._decoder if delta else None
            receipt = pull_weights(
                self._receiver,
                self._media[medium],
                version=self._version,
                delta=decoder,
                assembly=self._assembly,
                memory=self._receiver.memory,
            )
        assert receipt is not None
        return receipt.num_bytes_moved

    def timed(self, step: Callable[[], Any]) -> float:
        """Seconds from when one process begins until both are through, by the clock that they share: a barrier at the
        end would take 0.3 ms of a step in which one waits, and 2 ms where both come late."""
        self._bare.barrier().wait()
        started = time.monotonic()
        step()
        own = torch.tensor([started, time.monotonic()], dtype=torch.float64)
        both = [torch.empty_like(own) for _ in range(2)]
        self._bare.allgather([both], [own]).wait()
        return float(max(end for _, end in both) - min(start for start, _ in both))


def run_end(store_path: str, rank: int, rounds: int, pipe: Any) -> None:
    """One process: `rounds` rounds after one that is not counted, then the deltas. The sender sends the results."""
    torch.set_num_threads(1)
    ends = Ends(store_path, rank)
    steps: dict[str, Callable[[], Any]] = {
        "memcpy": ends.memcpy,
        "shared_memory": lambda: ends.sync("shared_memory"),
        "gloo_broadcast": ends.broadcast,
        "process_group": lambda: ends.sync("process_group"),
        "hash": ends.hash,
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            seconds[name].append(ends.timed(step))
    ends.sync("shared_memory", delta=True)
    moved = {}
    for share in CHANGED_SHARES:
        ends.sender.change(share)
        moved[str(share)] = ends.sync("shared_memory", delta=True) / ends.num_bytes
    if rank == 0:
        pipe.send((ends.num_bytes, {name: values[1:] for name, values in seconds.items()}, moved))


def run_processes(target: Callable[..., None], argument_lists: Sequence[Sequence[Any]]) -> Any:
    """Calls `target` in a process for each list of arguments, with the end of a pipe as the last one. Returns what came
    through the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    processes = [context.Process(target=target, args=(*arguments, theirs)) for arguments in argument_lists]
    for process in processes:
        process.start()
    while not ours.poll(1):
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"a process ended with {[process.exitcode for process in processes]}")
    result = ours.recv()
    for process in processes:
        process.join()
    return result


def measure_media(rounds: int) -> tuple[int, dict[str, list[float]], dict[str, float]]:
    """Bytes of the weights; seconds of every round, by step; share of the bytes that travelled, by share changed."""
    with tempfile.TemporaryDirectory() as scratch:
        store = str(Path(scratch) / "store")
        result: tuple[int, dict[str, list[float]], dict[str, float]] = run_processes(
            run_end, [(store, rank, rounds) for rank in range(2)]
        )
        return result


def nothing(tensor: Tensor) -> int:
    """Stands for the checksum of what is served."""
    return 0


def finite_alone(tensor: Tensor, *, may_be_infinite: bool) -> int | None:
    """Stands for the checksum of what is sent, beside which it is looked through."""
    return 0 if is_finite(tensor, may_be_infinite=may_be_infinite) else None


def measure_local(rounds: int) -> dict[str, list[float]]:
    """Seconds of a sync inside one process, with checksums and without, round by round."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    seconds: dict[str, list[float]] = {"in_process": [], "unproven": []}
    with tempfile.TemporaryDirectory() as scratch, process_group(Rank(0, 1, 0), device_type="cpu", timeout_seconds=600):
        folder = Path(scratch) / "model"
        build_folder(MODELS["dense"], folder)
        config, optimizer = EngineConfig(param_dtype="bfloat16"), OptimizerConfig()
        engine = TrainEngine.build(folder, config, device=device, optimizer=optimizer, total_steps=1, seed=0)
        rollout = EmbeddedEngine.from_folder(folder, dtype=DTYPE, max_rows=1, device=device)
        for version in range(rounds + 1):
            seconds["in_process"].append(sync_local(engine.named_weights(DTYPE), rollout, version=version).seconds)
            with (
                patch("shardwise.checksum.checksum", nothing),
                patch("shardwise.transfer.receipt._checksum_if_finite", finite_alone),
            ):
                seconds["unproven"].append(sync_local(engine.named_weights(DTYPE), rollout, version=version).seconds)
    return {name: values[1:] for name, values in seconds.items()}


def needed_of(name: str, shape: torch.Size, rank: int, num_ranks: int) -> Region:
    """What a rank of a tensor-parallel engine computes with: a share of the columns of output projections, of the rows
    of other matrices, and all of a norm."""
    if len(shape) < 2:
        return Region.whole(shape)
    cut = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
    shares = [(rank * size // num_ranks, (rank + 1) * size // num_ranks) for size in shape]
    return Region.box(share if dim == cut else (0, shape[dim]) for dim, share in enumerate(shares))


def run_rank(store_path: str, folder: str, rank: int, num_ranks: int, rounds: int, pipe: Any) -> None:
    """One rank. The first sends the seconds of every round of both ways."""
    torch.set_num_threads(1)
    os.environ[STORE_VARIABLE] = store_path
    seconds: dict[str, list[float]] = {"whole": [], "needed": []}
    with process_group(Rank(rank, num_ranks, rank), device_type="cpu", timeout_seconds=600):
        config, device = EngineConfig(param_dtype="bfloat16"), torch.device("cpu")
        engine = TrainEngine.build(Path(folder), config, device=device, optimizer=OptimizerConfig())
        needed = {name: needed_of(name, t.shape, rank, num_ranks) for name, t in engine.named_weights(DTYPE)}
        for _ in range(rounds + 1):
            for way, stream in (
                ("whole", lambda: engine.named_weights(DTYPE)),
                ("needed", lambda: engine.needed_weights(DTYPE, needed)),
            ):
                dist.barrier()
                started = time.monotonic()
                deque(stream(), maxlen=0)
                dist.barrier()
                seconds[way].append(time.monotonic() - started)
    if rank == 0:
        pipe.send({way: values[1:] for way, values in seconds.items()})


def measure_needed(num_ranks: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of gathering all weights on every rank, and what each needs, round by round."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, store = Path(scratch) / "model", str(Path(scratch) / "store")
        build_folder(MODELS["dense"], folder)
        found: dict[str, list[float]] = run_processes(
            run_rank, [(store, str(folder), rank, num_ranks, rounds) for rank in range(num_ranks)]
        )
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    args = parser.parse_args()
    num_bytes, seconds, moved = measure_media(args.rounds)
    local = measure_local(args.rounds)
    gathering = {num_ranks: measure_needed(num_ranks, args.rounds) for num_ranks in (2, 4)}
    rates = {name: [num_bytes / each for each in values] for name, values in seconds.items()}
    spreads = {
        "shared_memory/memcpy": paired_ratios(rates["shared_memory"], rates["memcpy"]),
        "process_group/gloo_broadcast": paired_ratios(rates["process_group"], rates["gloo_broadcast"]),
    }
    lost = [whole - bare for whole, bare in zip(local["in_process"], local["unproven"], strict=True)]
    hashing = paired_ratios(lost, local["in_process"])
    report(
        "weight_sync",
        ratios={
            "memcpy": spreads["shared_memory/memcpy"]["median"],
            "gloo_broadcast": spreads["process_group/gloo_broadcast"]["median"],
        },
        memory_ratios={},
        values={
            "settings": {
                "rounds": args.rounds,
                "dtype": "bfloat16",
                "threads_per_process": 1,
                "bucket_bytes": DEFAULT_BUCKET_BYTES,
            },
            "weight_bytes": num_bytes,
            "spreads": spreads,
            "gigabytes_per_second": {name: round(statistics.median(each) / 1e9, 2) for name, each in rates.items()},
            "delta_bytes_by_share_changed": {share: round(part, 4) for share, part in moved.items()},
            "in_process_seconds": round(statistics.median(local["in_process"]), 3),
            "checksum_share_of_in_process": hashing,
            "needed_seconds_of_whole": {
                f"{num_ranks} ranks": paired_ratios(found["needed"], found["whole"])
                for num_ranks, found in gathering.items()
            },
        },
        write=not args.no_write,
    )


if __name__ == "__main__":
    main()
