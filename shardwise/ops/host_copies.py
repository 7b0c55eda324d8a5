"""Moves tensors to host memory and back, so that others can use the device in between."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostCopies:
    """Copies of tensors that have been moved to the host. The tensors stay the same objects: only the storage behind
    them is freed and filled again, so whatever else holds them (FSDP's units, the optimizer) need not know."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        """Key of a storage -> the emptied storage, and its bytes on the host."""

    def __bool__(self) -> bool:
        return bool(self._copies)

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copies the storages of the tensors to (pinned) host memory and frees them. Returns when all have arrived."""
        devices = set()
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage._cdata in self._copies or storage.nbytes() == 0:
                continue
            devices.add(local.device)
            data = torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage)
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=local.device.type != "cpu")
            self._copies[storage._cdata] = storage, host.copy_(data, non_blocking=True)
        for device in devices:
            _wait(device)
        for storage, _ in self._copies.values():
            storage.resize_(0)

    def give_back(self) -> None:
        """Fills the storages again, on the device they were on; what the device computes next waits for the copies."""
        for storage, host in self._copies.values():
            storage.resize_(host.nbytes)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(host, non_blocking=True)
        self._copies.clear()


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
