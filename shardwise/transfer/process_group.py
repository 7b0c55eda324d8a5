"""A medium over a process group of its own: trainer and rollout processes that share nothing but a torch Store."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.memfd import SharedTensors
from shardwise.transfer.buckets import MAX_HEADER_BYTES, Header, aligned
from shardwise.transfer.medium import SENDER, EndLostError, MediumError, Place, Rendezvous, nowhere

_POLL_SECONDS = 0.0005
_TAG = 0
_MAX_DIRECT_RECEIVERS = 2
"""The most receivers that gloo sends to one by one: buckets take 0.75 of the time of their broadcasts, each of which
wakes a thread of gloo's (measured). With more, those of a broadcast pass on to others what they have."""


class _Coming(NamedTuple):
    """A bucket on its way to this receiver."""

    header: str
    blocks: list[Tensor]
    works: list[Any]


class ProcessGroupMedium:
    """Sends or broadcasts buckets with gloo or NCCL. The group is not in torch's registry: no end needs a default
    process group, and those that exist may have other sizes and backends.

    A bucket is its header, of a fixed size, and its blocks, each carried on its own: into one of two buffers in turn,
    or from where it lies to where it is served.
    """

    large_bytes = 1 << 19
    """From this size on what a block of its own costs is less than the copies on both sides (measured with gloo)."""

    def __init__(
        self, group: Any, rendezvous: Rendezvous, *, is_gloo: bool, timeout: timedelta, device: torch.device
    ) -> None:
        self._group, self._rendezvous = group, rendezvous
        self._is_gloo, self._timeout, self._device = is_gloo, timeout, device
        self._is_direct = is_gloo and group.size() - 1 <= _MAX_DIRECT_RECEIVERS
        self._headers = [torch.zeros(MAX_HEADER_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._works: list[list[Any]] = [[], []]
        """What still reads each of this sender's two buffers."""
        self._turn = 0
        self._header: list[Any] | None = None
        """What receives the next header; None if none is due."""
        self._coming: deque[_Coming] = deque()

    @classmethod
    def join(
        cls,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        backend: Literal["gloo", "nccl"] = "gloo",
        timeout: timedelta = timedelta(minutes=5),
        device: torch.device | None = None,
    ) -> Self:
        """Waits until all ends have joined.

        Args:
            store: the same for all ends and for nothing else; a PrefixStore of another one will do.
            rank: 0 sends, 1 .. size - 1 receive.
            timeout: limits every single wait.
            device: where buckets lie; the host with gloo, this process's GPU with nccl.
        Raises:
            ValueError: the backend cannot carry buckets of the device, or this build of torch has no such backend.
            MediumError: an end did not come in time.
        """
        device = torch.device("cpu") if device is None else device
        if (backend == "gloo") != (device.type == "cpu"):
            raise ValueError(
                f"the process group of a weight sync has backend={backend} and device={device}; gloo carries buckets "
                "on the host (cpu), nccl on a GPU"
            )
        rendezvous = Rendezvous(store, rank, size, timeout=timeout)
        rendezvous.meet("joining the process group", "")
        group_store = dist.PrefixStore(backend, store)
        try:
            if backend == "gloo":
                group = dist.ProcessGroupGloo(group_store, rank, size, timeout=timeout)
            else:
                group = _nccl_group(group_store, rank, size, timeout)
        except RuntimeError as error:
            raise EndLostError(f"joining the process group: {error}") from error
        return cls(group, rendezvous, is_gloo=backend == "gloo", timeout=timeout, device=device)

    @property
    def device(self) -> torch.device:
        """See Medium."""
        return self._device

    def meet(self, phase: str, message: str) -> list[str]:
        """See Medium. Goes through gloo where it can, which is faster and notices at once that a connection has closed;
        through the store a dead end is only silent."""
        if not self._is_gloo:
            return self._rendezvous.meet(phase, message)
        said = torch.tensor(list(message.encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(said)]), phase)]
        padded = torch.nn.functional.pad(said, (0, max(*sizes, 1) - len(said)))
        answers = zip(self._all_gather(padded, phase), sizes, strict=True)
        return [answer[:size].numpy().tobytes().decode() for answer, size in answers]

    def expose(self, memory: SharedTensors, places: Mapping[str, tuple[int, int]]) -> None:
        """See Medium. Does nothing: this medium cannot write to such memory."""

    def exposed(self) -> Mapping[str, Tensor]:
        """See Medium."""
        return {}

    def buffer(self, num_bytes: int) -> Tensor:
        """See Medium. Waits until the bucket before the last one, which was in this buffer, is sent."""
        self._turn = 1 - self._turn
        self._finish(self._turn)
        return self._room(self._turn, num_bytes)

    def send(self, header: str, packed: Tensor, laid: Sequence[Tensor] = ()) -> None:
        """See Medium."""
        encoded = header.encode()
        if len(encoded) > MAX_HEADER_BYTES:
            raise ValueError(f"a bucket's header has {len(encoded)} bytes, more than {MAX_HEADER_BYTES}")
        padded = torch.frombuffer(bytearray(encoded.ljust(MAX_HEADER_BYTES)), dtype=torch.uint8)
        self._headers[self._turn].copy_(padded)
        for block in (self._headers[self._turn], packed, *laid):
            if len(block):
                self._works[self._turn] += self._carried(block)

    def receive(self, place: Place = nowhere) -> tuple[str, list[Tensor]]:
        """See Medium."""
        if not self._coming:
            self._expect_header()
        while self._header is not None and len(self._coming) < len(self._buffers):
            self._expect_data(place)
        bucket = self._coming.popleft()
        self._wait(bucket.works, "receiving weights")
        return bucket.header, bucket.blocks

    def break_off(self, message: str) -> list[str | None]:
        """See Medium."""
        self.close()
        return self._rendezvous.break_off(message)

    def close(self) -> None:
        """See Medium. Dropping the group closes its connections, which ends the wait of the other ends. NCCL would wait
        for what is in flight, so it is aborted."""
        if self._group is not None and not self._is_gloo:
            self._group.abort()
        self._works, self._group = [[], []], None
        self._coming.clear()

    def _expect_header(self) -> None:
        """Begins to receive the next header."""
        self._turn = 1 - self._turn
        self._header = self._carried(self._headers[self._turn])

    def _expect_data(self, place: Place) -> None:
        """Waits for the header, and begins to receive its blocks and the header behind them."""
        assert self._header is not None
        self._wait(self._header, "receiving weights")
        header = bytes(self._headers[self._turn].cpu().numpy()).decode().rstrip()
        content = Header.decode(header)
        blocks = self._blocks(content.block_bytes, place(header))
        works = [work for block in blocks if len(block) for work in self._carried(block)]
        self._coming.append(_Coming(header, blocks, works))
        self._header = None
        if not content.is_last:
            self._expect_header()

    def _blocks(self, sizes: list[int], places: Sequence[Tensor | None]) -> list[Tensor]:
        """Returns where blocks of these sizes are received: in their places, the others one behind the other in the
        buffer whose turn it is."""
        device = self._headers[self._turn].device
        blocks = [place if place is not None and place.device == device else None for place in places]
        blocks += [None] * (len(sizes) - len(blocks))
        rooms = [0 if block is not None else aligned(size) for size, block in zip(sizes, blocks, strict=True)]
        room = self._room(self._turn, sum(rooms)).split(rooms)
        return [own[:size] if block is None else block for size, own, block in zip(sizes, room, blocks, strict=True)]

    def _room(self, turn: int, num_bytes: int) -> Tensor:
        if self._buffers[turn].numel() < num_bytes:
            self._buffers[turn] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffers[turn][:num_bytes]

    def _all_gather(self, data: Tensor, phase: str) -> list[Tensor]:
        """Returns every end's data, in the order of the ends; with gloo."""
        gathered = [torch.empty_like(data) for _ in range(self._group.size())]
        self._wait([self._begun(lambda: self._group.allgather([gathered], [data]))], phase)
        return gathered

    def _carried(self, data: Tensor) -> list[Any]:
        """Begins to carry data from the sender to all receivers; called with as many bytes at every end."""
        if not self._is_direct:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = SENDER, 0
            return [self._begun(lambda: self._group.broadcast([data], options))]
        if self._group.rank() == SENDER:
            receivers = range(SENDER + 1, self._group.size())
            return [self._begun(partial(self._group.send, [data], receiver, _TAG)) for receiver in receivers]
        return [self._begun(partial(self._group.recv, [data], SENDER, _TAG))]

    def _begun(self, collective: Callable[[], Any]) -> Any:
        try:
            return collective()
        except RuntimeError as error:
            raise EndLostError(f"the process group failed: {str(error).strip()}") from error

    def _finish(self, turn: int) -> None:
        """Waits until nothing reads this sender's buffer, or what was sent with it, any more."""
        works, self._works[turn] = self._works[turn], []
        self._wait(works, "sending weights")

    def _wait(self, works: list[Any], phase: str) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        try:
            for work in works:
                # gloo keeps its deadline itself. NCCL's watchdog would end the process.
                while not self._is_gloo and not work.is_completed():
                    if time.monotonic() > deadline:
                        raise EndLostError(f"{phase}: timed out after {self._timeout.total_seconds():g} s")
                    time.sleep(_POLL_SECONDS)
                work.wait()
        except MediumError:
            raise
        except RuntimeError as error:
            raise EndLostError(f"{phase}: {str(error).strip()}") from error


def _nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    if not dist.is_nccl_available():
        raise ValueError("this build of torch has no NCCL; use backend=gloo")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # our own timeout comes first, and names who is missing
    return dist.ProcessGroupNCCL(store, rank, size, options)
