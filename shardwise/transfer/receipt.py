"""The receipt of a weight sync: what was sent and what is served must be the same bytes."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import xxhash
from torch import Tensor

from shardwise.checksum import checksum
from shardwise.config import NotFiniteError
from shardwise.ops import is_finite, on_current_stream

_PIECE_BYTES = 1 << 21
"""Bytes that caches still hold when they are hashed after being summed; smaller pieces cost more than they save."""


class WeightSyncError(RuntimeError):
    """The rollout engine does not serve the weights it was sent; the run must stop."""


class NotFiniteWeightsError(WeightSyncError, NotFiniteError):
    """The weights to send hold NaN or infinities: the run has diverged."""


@dataclass(frozen=True, slots=True)
class SyncReceipt:
    """Proof of a verified sync. The receipts of both sides are equal, unless something other than what was sent
    arrived."""

    version: int
    num_tensors: int
    num_bytes: int
    """Bytes of the weights."""
    digest: str
    """xxh3 over the names and checksums of all tensors, in the order they were sent."""
    seconds: float = field(default=0.0, compare=False)
    num_bytes_moved: int = field(default=0, compare=False)
    """Bytes that traveled: fewer than the weights have if only changes were sent."""
    num_proven: int = field(default=0, compare=False)
    """Tensors that the engine could read back; the others are only proven to have arrived."""
    seconds_of_proof: float = field(default=0.0, compare=False)
    """The part of `seconds` that went only into waiting for hashes and comparing them."""


@contextmanager
def gathered_to_the_end(weights: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
    """Drains `weights` on exit, after an error too: every tensor is gathered in a collective in which the other ranks
    wait for this one."""
    try:
        yield
    finally:
        deque(weights, maxlen=0)  # discards them


class Manifest:
    """Name, checksum and size of every tensor of one version, recorded while the tensors stream by."""

    def __init__(
        self,
        version: int,
        served: Iterable[tuple[str, Tensor]] | None = None,
        *,
        may_be_infinite: Collection[str] = (),
    ) -> None:
        """
        Args:
            served: what the engine serves before the sync, which tells the names, shapes and dtypes it can take; None
                on the side that has no engine.
            may_be_infinite: names of tensors that may hold infinities, though no NaN.
        """
        self._version, self._may_be_infinite = version, may_be_infinite
        self._forms = None if served is None else {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in served}
        self.checksums: dict[str, int] = {}
        """Name -> checksum of every tensor noted so far."""
        self._begun: set[str] = set()
        """Names of tensors that were begun with; they are noted later."""
        self._num_bytes = 0
        self._seconds_of_proof = 0.0

    def record(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes the tensors on. Each is checked for NaN and infinities and hashed while it is used, and noted when the
        next one is asked for. Raises as `hashed`, before a tensor is passed on or after it."""
        with ThreadPoolExecutor(1) as pool:
            for name, tensor in weights:
                noted = self.hashed(name, tensor, pool)
                yield name, tensor
                noted()
                del tensor, noted  # else it would stay while the next one is gathered

    def hashed(self, name: str, tensor: Tensor, pool: Executor) -> Callable[[], int]:
        """Begins to check a tensor for NaN and infinities and to hash it, in parallel to whatever uses it.

        Returns:
            A function that waits for that, notes the tensor and returns its checksum; it raises NotFiniteWeightsError
            if the tensor holds NaN, or infinities that it may not hold.
        Raises:
            WeightSyncError: the engine has no place for such a tensor.
        """
        self.begin(name, tensor.dtype, tuple(tensor.shape))
        check = partial(_checksum_if_finite, may_be_infinite=name in self._may_be_infinite)
        hashing = pool.submit(on_current_stream(check, tensor.device), tensor)

        def noted() -> int:
            with self._proving():
                digest = hashing.result()
            if digest is None:
                raise NotFiniteWeightsError(
                    f"weight sync {self._version}: {name} holds values that are not finite: training has diverged; "
                    "lower trainer.learning_rate and resume from a checkpoint before it"
                )
            self.note(name, digest, tensor.nbytes)
            return digest

        return noted

    def begin(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Begins with a tensor, which is noted later. Raises WeightSyncError: the engine does not serve such a tensor,
        or was sent it before."""
        if name in self._begun:
            raise self._error(f"{name} was sent twice")
        self._begun.add(name)
        if self._forms is None:
            return
        if name not in self._forms:
            raise self._error(f"{name} was sent, which the engine does not serve")
        if self._forms[name] != (dtype, shape):
            sent, served = (f"{kind} {list(size)}" for kind, size in ((dtype, shape), self._forms[name]))
            raise self._error(f"{name} was sent as {sent}, the engine serves {served}")

    def note(self, name: str, digest: int, num_bytes: int) -> None:
        """Records the checksum and size of a tensor."""
        self.checksums[name] = digest
        self._num_bytes += num_bytes

    def receipt(self, *, seconds: float = 0.0, num_bytes_moved: int = 0, num_proven: int = 0) -> SyncReceipt:
        """Returns the receipt for all tensors noted so far."""
        digest = xxhash.xxh3_64()
        for name, value in self.checksums.items():
            digest.update(f"{name}:{value:016x}\n".encode())
        return SyncReceipt(
            self._version,
            len(self.checksums),
            self._num_bytes,
            digest.hexdigest(),
            seconds=seconds,
            num_bytes_moved=num_bytes_moved,
            num_proven=num_proven,
            seconds_of_proof=self._seconds_of_proof,
        )

    def verify(self, served: Iterable[tuple[str, int | None]]) -> int:
        """Compares the noted tensors with what the engine serves.

        Args:
            served: as from WeightReceiver.served_checksums.
        Returns:
            How many tensors could be compared.
        Raises:
            WeightSyncError: names the first tensor that was lost, altered, or never sent.
        """
        missing, num_proven = dict(self.checksums), 0
        with self._proving():
            for name, found in served:
                if name not in missing:
                    raise self._error(f"the engine serves {name}, which was not sent")
                sent = missing.pop(name)
                if found is None:
                    continue
                if found != sent:
                    raise self._error(f"the engine serves other values of {name} than were sent")
                num_proven += 1
        if missing:
            raise self._error(f"the engine does not serve {', '.join(sorted(missing))}")
        return num_proven

    @contextmanager
    def _proving(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds_of_proof += time.perf_counter() - started

    def _error(self, message: str) -> WeightSyncError:
        return WeightSyncError(f"weight sync {self._version}: {message}")


def _checksum_if_finite(tensor: Tensor, *, may_be_infinite: bool) -> int | None:
    """Like `checksum`, but None if the tensor holds NaN, or infinities that it may not hold. Host memory is read once
    for both."""
    if tensor.device.type != "cpu" or not tensor.is_floating_point():
        return checksum(tensor) if is_finite(tensor, may_be_infinite=may_be_infinite) else None
    digest, is_sum_finite = xxhash.xxh3_64(), True
    elements = tensor.detach().contiguous().view(-1)
    data = elements.view(torch.uint8).numpy().data
    for index, piece in enumerate(elements.split(_PIECE_BYTES // tensor.itemsize)):
        is_sum_finite = is_sum_finite and math.isfinite(piece.sum().item())
        digest.update(data[index * _PIECE_BYTES : (index + 1) * _PIECE_BYTES])
    return digest.intdigest() if is_sum_finite or is_finite(tensor, may_be_infinite=may_be_infinite) else None
