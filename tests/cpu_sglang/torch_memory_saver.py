"""The memory saver that SGLang sleeps with, on a CPU: it gives no memory back, and what was in it is lost all the same
(of tensors that a backup is kept of, until they come back)."""

from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_LOST = 255
"""In every byte: NaN in floating-point numbers."""


class _Recording(TorchDispatchMode):
    def __init__(self, storages: dict[int, torch.UntypedStorage]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                self._storages[storage.data_ptr()] = storage
        return result


class _MemorySaver:
    enabled = True

    def __init__(self) -> None:
        self._storages: dict[str, dict[int, torch.UntypedStorage]] = {}
        self._kept: dict[str, list[torch.UntypedStorage]] = {}
        self._has_backup: dict[str, bool] = {}

    @contextmanager
    def region(self, *, tag: str, enable_cpu_backup: bool = False):
        self._has_backup[tag] = enable_cpu_backup
        with _Recording(self._storages.setdefault(tag, {})):
            yield

    def pause(self, *, tag: str) -> None:
        storages = self._storages.get(tag, {}).values()
        if self._has_backup.get(tag):
            self._kept[tag] = [storage.clone() for storage in storages]
        for storage in storages:
            storage.fill_(_LOST)

    def resume(self, *, tag: str) -> None:
        for storage, kept in zip(self._storages.get(tag, {}).values(), self._kept.pop(tag, []), strict=False):
            storage.copy_(kept)

    def disable(self) -> AbstractContextManager[None]:
        return nullcontext()


torch_memory_saver = _MemorySaver()


def configure_subprocess() -> AbstractContextManager[None]:
    return nullcontext()
