"""What a checkpoint is written from while training goes on: this rank's shards, copied to host memory."""

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.shards import RowSharding, local_shard
from shardwise.fault_plan import fault_point
from shardwise.ops import nonfinite_names
from shardwise.types import Connections

_TAG = 1
"""Tag of shards on their way, to tell them from commands that travel over the same connections."""


class Copies:
    """Copies to host memory that run beside whatever only reads their sources, such as a forward or backward pass.

    A thread makes them from a CPU, a separate stream from an accelerator, in order with its other streams.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._running: list[Future[Tensor]] = []
        self._stream: torch.Stream | None = None

    def begin(self, target: Tensor, source: Tensor) -> None:
        """Begins to copy what `source` holds when all that was computed up to now is done."""
        if source.device.type == "cpu":
            self._running.append(self._thread.submit(target.copy_, source))
            return
        if self._stream is None:
            self._stream = torch.Stream(source.device)
        self._stream.wait_stream(torch.accelerator.current_stream(source.device))
        with self._stream:
            target.copy_(source, non_blocking=True)
        source.record_stream(self._stream)

    def wait(self) -> None:
        """To be called before a source changes. Waits for copies of host memory; if the sources are on a device, only
        the device waits."""
        self._join()
        self._running = []  # only now: the writer's thread may be about to wait for them too
        if self._stream is not None:
            torch.accelerator.current_stream(self._stream.device).wait_stream(self._stream)

    def finish(self) -> None:
        """Waits for the copies; to be called, in any thread, before a target is read."""
        self._join()
        if self._stream is not None:
            self._stream.synchronize()

    def _join(self) -> None:
        for copy in self._running:
            copy.result()


class StagingBuffers:
    """Host memory for copies of tensors by name. It is kept from one save to the next, for getting it anew costs more
    than filling it; so what was copied under a name before is overwritten."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._buffers: dict[str, Tensor] = {}

    def copy(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Begins to copy a plain tensor from any device, in its dtype or another, into memory that is page-locked where
        it comes from an accelerator."""
        fault_point("stage")
        dtype = dtype or tensor.dtype
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, dtype):
            pinned = tensor.device.type != "cpu"
            buffer = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=pinned)
            self._buffers[name] = buffer
        self.copies.begin(buffer, tensor.detach())
        return buffer


@dataclass(frozen=True, slots=True)
class _Rows:
    """This rank's rows of a tensor, and who has the others."""

    mine: Tensor
    shape: torch.Size
    sharding: RowSharding
    ranks: list[int]
    """Ranks of the sharding, in its order; this rank alone if the tensor is not sharded."""


class HostShards:
    """Shards in host memory that become whole tensors on the rank that writes them."""

    def __init__(self, buffers: StagingBuffers) -> None:
        self._buffers = buffers
        self._rows: dict[str, _Rows] = {}

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Begins to copy this rank's shard of a tensor, in a dtype, for `whole` to put together."""
        sharding = RowSharding.of(tensor)
        ranks = [dist.get_rank()] if sharding.group is None else dist.get_process_group_ranks(sharding.group)
        copy = self._buffers.copy(name, local_shard(tensor), dtype)
        self._rows[name] = _Rows(copy, tensor.shape, sharding, ranks)

    def nonfinite_names(self, *, may_be_infinite: Collection[str] = ()) -> list[str]:
        """Names of the tensors whose rows on this rank hold NaN or an infinity; of those that may be infinite, NaN.
        Waits for the copies."""
        self._buffers.copies.finish()
        mine = ((name, rows.mine) for name, rows in self._rows.items())
        return nonfinite_names(mine, may_be_infinite=may_be_infinite)

    def whole(self, name: str, writer: int, links: Connections) -> Tensor | None:
        """Returns the full tensor on rank `writer`, None elsewhere. To be called on every rank, in the same order. Each
        other rank that holds rows of the writer's replica sends them to it. Waits for the copies."""
        self._buffers.copies.finish()
        rows = self._rows[name]
        me = rows.ranks[rows.sharding.rank]
        if rows.ranks == [me]:
            return rows.mine if me == writer else None
        if writer not in rows.ranks:  # a rank of another replica
            return None
        if me != writer:
            if rows.mine.numel():
                links.send([rows.mine], writer, _TAG).wait()
            return None
        full = torch.empty(rows.shape, dtype=rows.mine.dtype)
        arriving = []
        for place, rank in enumerate(rows.ranks):
            held = rows.sharding.rows(rows.shape[0], place)
            part = full[held.start : held.stop]
            if rank == me:
                part.copy_(rows.mine)
            elif part.numel():
                arriving.append(links.recv([part], rank, _TAG))
        for work in arriving:
            work.wait()
        return full
