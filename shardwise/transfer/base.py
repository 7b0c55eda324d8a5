"""The receipt of a weight sync: what was sent and what is served must be the same bytes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor


class WeightSyncError(RuntimeError):
    """The rollout engine does not serve the weights it was sent; the run must stop."""


@dataclass(frozen=True, slots=True)
class SyncReceipt:
    """A sync that was verified."""

    version: int
    num_tensors: int
    num_bytes: int


def checksum(tensor: Tensor) -> int:
    """xxh3 of the tensor's bytes in memory order."""
    return xxhash.xxh3_64_intdigest(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)


class Manifest:
    """Name, checksum and size of every tensor of one version, written down while the tensors stream by."""

    def __init__(self, version: int, served: Iterable[tuple[str, Tensor]]) -> None:
        """`served`: what the engine serves before the sync, which tells the names, shapes and dtypes it can take."""
        self._version = version
        self._forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in served}
        self._checksums: dict[str, int] = {}
        self._num_bytes = 0

    def record(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes the tensors on and notes them.

        Raises:
            WeightSyncError: a tensor that the engine has no place for, or that is not finite, before it is passed on.
        """
        for name, tensor in weights:
            self._require_place(name, tensor)
            if not tensor.isfinite().all():
                raise WeightSyncError(f"weight sync {self._version}: {name} holds values that are not finite")
            self._checksums[name] = checksum(tensor)
            self._num_bytes += tensor.nbytes
            yield name, tensor

    def verify(self, served: Iterable[tuple[str, Tensor]]) -> SyncReceipt:
        """Compares with what the engine serves. Of a tensor on the meta device, which the engine cannot read back, only
        that it has arrived.

        Raises:
            WeightSyncError: names the first tensor that was lost, altered, or never sent.
        """
        missing = dict(self._checksums)
        for name, tensor in served:
            if name not in missing:
                raise WeightSyncError(f"weight sync {self._version}: the engine serves {name}, which was not sent")
            sent = missing.pop(name)
            if not tensor.is_meta and checksum(tensor) != sent:
                raise WeightSyncError(
                    f"weight sync {self._version}: the engine serves other values of {name} than were sent"
                )
        if missing:
            raise WeightSyncError(
                f"weight sync {self._version}: the engine does not serve {', '.join(sorted(missing))}"
            )
        return SyncReceipt(self._version, len(self._checksums), self._num_bytes)

    def _require_place(self, name: str, tensor: Tensor) -> None:
        if name not in self._forms:
            raise WeightSyncError(f"weight sync {self._version}: {name} was sent, which the engine does not serve")
        if name in self._checksums:
            raise WeightSyncError(f"weight sync {self._version}: {name} was sent twice")
        form = (tensor.dtype, tuple(tensor.shape))
        if form != self._forms[name]:
            sent, served = (f"{dtype} {list(shape)}" for dtype, shape in (form, self._forms[name]))
            raise WeightSyncError(f"weight sync {self._version}: {name} was sent as {sent}, the engine serves {served}")
