"""A medium inside one host: buckets lie in memory that all ends have mapped, sockets say which one is full.

The memory has no name (a memfd whose descriptor is passed, or a GPU's memory under torch's CUDA IPC handles), so
nothing is left behind, whoever dies. The death of an end closes its socket, which is noticed at once.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.config import ConfigError
from shardwise.memfd import SharedTensors, create_memory, mapped
from shardwise.scratch import scratch_folder
from shardwise.transfer.medium import SENDER, EndLostError, MediumError, Place, Rendezvous, name_of, nowhere

_NUM_SLOTS = 2
_PACKET_BYTES = 1 << 17
_PIECE_BYTES = 1 << 15
"""Size of the pieces of a meeting's messages, which grow with the number of receivers: as much as fits into a packet on
any host."""
_GIVES_BACK, _MEETS, _EXPOSES = b"b", b"m", b"e"
"""What a receiver's packet begins with."""
_GOES_ON, _ENDS = b"+", b"."
"""What the pieces of a longer message begin with."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SharedMemoryMedium:
    """A medium with two slots for buckets: the sender fills one while the receivers read the other. A receiver that
    goes on to the next bucket gives back the slot before. If there is only one receiver, the sender writes straight to
    where it serves from: one copy instead of two. Linux only."""

    large_bytes = sys.maxsize
    """No tensor counts as large: everything has to be copied into memory that is shared."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        peers: dict[int, socket.socket],
        *,
        size: int,
        timeout: timedelta,
        device: torch.device,
    ) -> None:
        """`peers`: a connection to each receiver, or to the sender."""
        self._rendezvous, self._peers = rendezvous, peers
        self._timeout, self._device = timeout, device
        self._slots: list[Tensor | None] = [None] * _NUM_SLOTS
        self._new_slots: dict[int, list[int]] = {}
        """Slots that the receivers have not mapped yet, and the descriptors to pass."""
        self._readers: list[set[int]] = [set() for _ in range(_NUM_SLOTS)]
        """For each slot the receivers that have not given it back."""
        self._turn = 0
        self._held: int | None = None
        """The slot that this receiver reads."""
        self._can_expose = size == 2 and device.type == "cpu"
        self._places: tuple[int, Mapping[str, tuple[int, int]]] | None = None
        """What this receiver has exposed: the memory's descriptor, and the places in it."""
        self._exposed: dict[str, Tensor] = {}

    @classmethod
    def join(
        cls,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        timeout: timedelta = timedelta(minutes=5),
        device: torch.device | None = None,
    ) -> Self:
        """Waits until all ends have joined.

        Args:
            store, rank, size, timeout: as for ProcessGroupMedium.join.
            device: where buckets lie: the host, or the GPU that all ends use, each through its own CUDA context.
        Raises:
            ConfigError: at every end: one is on another host. MediumError: an end did not come in time.
        """
        device = torch.device("cpu") if device is None else device
        rendezvous = Rendezvous(store, rank, size, timeout=timeout)
        with scratch_folder() as folder:
            address = str(folder / "weights")
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.settimeout(timeout.total_seconds())
                if rank == SENDER:
                    listener.bind(address)
                    listener.listen(size)
                places = rendezvous.meet(
                    "joining shared memory", json.dumps([_BOOT_ID.read_text().strip(), address, socket.gethostname()])
                )
                _require_one_host([json.loads(place) for place in places])
                peers = (
                    _accept(listener, size)
                    if rank == SENDER
                    else _connect(json.loads(places[SENDER])[1], rank, timeout=timeout)
                )
                rendezvous.meet("joining shared memory", "")
        return cls(rendezvous, peers, size=size, timeout=timeout, device=device)

    @property
    def device(self) -> torch.device:
        """See Medium."""
        return self._device

    def meet(self, phase: str, message: str) -> list[str]:
        """See Medium. Goes over the sockets, so that the end of a process is noticed at once."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        if SENDER in self._peers:
            self._send_packet(phase, SENDER, _MEETS + message.encode())
            packets = iter(lambda: self._receive_packet(phase, SENDER, deadline)[0], None)
            answers: list[str] = json.loads(_joined(packets))
            return answers
        answers = [message] + [self._message_of(phase, rank, deadline) for rank in sorted(self._peers)]
        said = json.dumps(answers).encode()
        for rank in self._peers:
            for piece in _pieces(said):
                self._send_packet(phase, rank, piece)
        return answers

    def expose(self, memory: SharedTensors, places: Mapping[str, tuple[int, int]]) -> None:
        """See Medium."""
        if not self._can_expose or self._places == (memory.descriptor, places):
            return
        self._places = memory.descriptor, places
        for piece in _pieces(json.dumps(places).encode()):
            self._send_packet("exposing memory", SENDER, _EXPOSES + piece, [memory.descriptor])

    def exposed(self) -> Mapping[str, Tensor]:
        """See Medium."""
        return self._exposed

    def buffer(self, num_bytes: int) -> Tensor:
        """See Medium. Waits until every receiver has given the slot back."""
        self._turn = (self._turn + 1) % _NUM_SLOTS
        deadline = time.monotonic() + self._timeout.total_seconds()
        while self._readers[self._turn]:
            rank = min(self._readers[self._turn])
            self._note_given_back(rank, self._receive_packet("sending weights", rank, deadline)[0])
        slot = self._slots[self._turn]
        if slot is None or slot.numel() < num_bytes:
            slot = self._slots[self._turn] = self._allocate(self._turn, num_bytes)
        return slot[:num_bytes]

    def send(self, header: str, packed: Tensor, laid: Sequence[Tensor] = ()) -> None:
        """See Medium."""
        assert not laid, "no tensor is large here"
        if packed.device.type != "cpu":
            torch.accelerator.current_stream(packed.device).synchronize()  # other processes do not see the stream
        is_new = self._turn in self._new_slots
        descriptors = self._new_slots.pop(self._turn, [])
        try:
            for rank in self._peers:
                place = {"slot": self._turn, "num_bytes": packed.numel(), **(self._location() if is_new else {})}
                packet = json.dumps(place).encode() + b"\n" + header.encode()
                self._send_packet("sending weights", rank, packet, descriptors)
                self._readers[self._turn].add(rank)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def receive(self, place: Place = nowhere) -> tuple[str, list[Tensor]]:
        """See Medium. Ignores `place`: data stays in the slot, and whoever wants it elsewhere copies it once."""
        self._give_back()
        packet, descriptors = self._receive_packet(
            "receiving weights", SENDER, time.monotonic() + self._timeout.total_seconds()
        )
        announcement, header = packet.split(b"\n", 1)
        announced = json.loads(announcement)
        if "capacity_bytes" in announced:
            self._slots[announced["slot"]] = mapped(descriptors[0])
            os.close(descriptors[0])
        elif "cuda_ipc" in announced:
            self._slots[announced["slot"]] = _opened_cuda_ipc(announced["cuda_ipc"], self._device)
        slot = self._slots[announced["slot"]]
        assert slot is not None
        self._held = announced["slot"]
        return header.decode(), [slot[: announced["num_bytes"]]]

    def break_off(self, message: str) -> list[str | None]:
        """See Medium."""
        self._let_go()
        answers = self._rendezvous.break_off(message)
        self._collect()  # an end that has answered has let go
        return answers

    def close(self) -> None:
        """See Medium. Host memory is freed when the last end that has it mapped lets go of it. A GPU's is freed by the
        sender, which first waits for the receivers to let go, as long as `break_off` waits for answers."""
        if SENDER not in self._peers and self._device.type != "cpu":
            self._wait_until_receivers_let_go()
        self._let_go()
        self._collect()

    def _let_go(self) -> None:
        self._slots, self._exposed, self._places = [None] * _NUM_SLOTS, {}, None
        for peer in self._peers.values():  # last, for it tells the sender that nothing is mapped here
            peer.close()

    def _wait_until_receivers_let_go(self) -> None:
        deadline = time.monotonic() + Rendezvous.GRACE.total_seconds()
        for peer in self._peers.values():
            with suppress(OSError):  # it is gone, or was closed here before
                peer.shutdown(socket.SHUT_WR)  # whoever waits for more learns that there is none
        for peer in self._peers.values():
            with suppress(OSError):  # it is gone, or too slow
                peer.settimeout(max(deadline - time.monotonic(), 0.001))
                while peer.recv(_PACKET_BYTES):
                    pass

    def _collect(self) -> None:
        if self._device.type != "cpu":
            torch.cuda.ipc_collect()  # torch keeps what was freed while a receiver had it mapped until it is asked

    def _location(self) -> dict[str, Any]:
        """Says how one receiver maps the new slot."""
        slot = self._slots[self._turn]
        assert slot is not None
        if self._device.type == "cpu":
            return {"capacity_bytes": slot.numel()}
        return {"cuda_ipc": _cuda_ipc_handle(slot)}

    def _allocate(self, index: int, num_bytes: int) -> Tensor:
        if self._device.type == "cpu":
            descriptor = create_memory(num_bytes)
            self._new_slots[index] = [descriptor]
            return mapped(descriptor)
        self._new_slots[index] = []
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _give_back(self) -> None:
        if self._held is None:
            return
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()
        self._send_packet("receiving weights", SENDER, _GIVES_BACK + str(self._held).encode())
        self._held = None

    def _note_given_back(self, rank: int, packet: bytes) -> None:
        assert packet[:1] == _GIVES_BACK, packet[:1]
        self._readers[int(packet[1:])].discard(rank)

    def _message_of(self, phase: str, rank: int, deadline: float) -> str:
        """Returns what a receiver says at a meeting; before that it may give slots back and expose memory."""
        pieces: list[bytes] = []
        while True:
            packet, descriptors = self._receive_packet(phase, rank, deadline)
            match packet[:1]:
                case kind if kind == _MEETS:
                    return packet[1:].decode()
                case kind if kind == _EXPOSES:
                    pieces.append(packet[1:])
                    if packet[1:2] == _ENDS:
                        self._open(json.loads(_joined(iter(pieces))), descriptors[0])
                    for descriptor in descriptors:
                        os.close(descriptor)
                case _:
                    self._note_given_back(rank, packet)

    def _open(self, places: dict[str, tuple[int, int]], descriptor: int) -> None:
        memory = mapped(descriptor)
        self._exposed = {name: memory[offset : offset + num_bytes] for name, (offset, num_bytes) in places.items()}

    def _send_packet(self, phase: str, rank: int, packet: bytes, descriptors: Sequence[int] = ()) -> None:
        self._peers[rank].settimeout(self._timeout.total_seconds())
        try:
            socket.send_fds(self._peers[rank], [packet], descriptors)
        except OSError as error:
            raise EndLostError(f"{phase}: {name_of(rank)} has closed the connection ({error})") from error

    def _receive_packet(self, phase: str, rank: int, deadline: float) -> tuple[bytes, list[int]]:
        self._peers[rank].settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._peers[rank], _PACKET_BYTES, 1)
        except TimeoutError:
            raise EndLostError(f"{phase}: waited {self._timeout.total_seconds():g} s for {name_of(rank)}") from None
        except OSError as error:
            raise EndLostError(f"{phase}: {name_of(rank)} has closed the connection ({error})") from error
        if not packet:
            raise EndLostError(f"{phase}: {name_of(rank)} has closed the connection")
        return packet, descriptors


def _pieces(said: bytes) -> Iterator[bytes]:
    for start in range(0, len(said), _PIECE_BYTES):
        mark = _GOES_ON if start + _PIECE_BYTES < len(said) else _ENDS
        yield mark + said[start : start + _PIECE_BYTES]


def _joined(pieces: Iterator[bytes]) -> bytes:
    """Returns the message that `_pieces` made these of; takes none of the pieces after it."""
    taken = [next(pieces)]
    while taken[-1][:1] == _GOES_ON:
        taken.append(next(pieces))
    return b"".join(piece[1:] for piece in taken)


def _require_one_host(places: list[list[str]]) -> None:
    boot_id, _, host = places[SENDER]
    for rank, (other, _, other_host) in enumerate(places):
        if other != boot_id:
            raise ConfigError(
                f"rollout.placement.medium=shared_memory connects processes of one host, but the sender is on {host} "
                f"and {name_of(rank)} on {other_host}; use process_group between hosts"
            )


def _accept(listener: socket.socket, size: int) -> dict[int, socket.socket]:
    peers: dict[int, socket.socket] = {}
    while len(peers) < size - 1:
        try:
            peer, _ = listener.accept()
            peer.settimeout(listener.gettimeout())
            peers[int(peer.recv(16))] = peer
        except (OSError, ValueError) as error:
            missing = [name_of(rank) for rank in range(1, size) if rank not in peers]
            raise EndLostError(f"joining shared memory: {' and '.join(missing)} did not connect ({error})") from error
    return peers


def _connect(address: str, rank: int, *, timeout: timedelta) -> dict[int, socket.socket]:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(timeout.total_seconds())
    try:
        peer.connect(address)
        peer.send(str(rank).encode())
    except OSError as error:
        raise MediumError(
            f"joining shared memory: the sender's socket {address} cannot be reached ({error}); all ends need the same "
            "temporary folder, which containers of one host may not have"
        ) from error
    return {SENDER: peer}


def _cuda_ipc_handle(slot: Tensor) -> list[Any]:
    """Returns what torch passes to one other process for a CUDA storage, JSON-serializable. Each receiver needs a
    handle of its own, which counts as one process that has the memory mapped. The device is left out: its number may
    differ there."""
    _, *handle = slot.untyped_storage()._share_cuda_()
    return [{"hex": part.hex()} if isinstance(part, bytes) else part for part in handle]


def _opened_cuda_ipc(handle: list[Any], device: torch.device) -> Tensor:
    """Maps the memory of a `_cuda_ipc_handle` as [num_bytes] uint8."""
    parts = [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in handle]
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *parts)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
