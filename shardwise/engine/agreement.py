"""Failures that all ranks share: no rank goes on into a collective that another will never enter."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from shardwise.config import UserError

_MAX_MESSAGE_BYTES = 4096


@contextmanager
def raised_on_every_rank(error_class: type[UserError]) -> Iterator[None]:
    """Collective over all ranks, at the end of the body, which itself must hold no collectives.

    Consumed by whatever may fail on one rank alone (its disk, its copy of a file). Without a process group it only
    turns a file system's error into a user's.

    Raises:
        error_class: the body failed on at least one rank: the message of the first of them, which it names unless
            the body failed on all.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    _raise_together(error, error_class)


def _raise_together(error: Exception | None, error_class: type[UserError]) -> None:
    message = (
        "" if error is None else str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    )
    if dist.is_initialized():
        failed = _failed_ranks(error is not None)
        if not failed:
            return
        message = _broadcast_text(message, source=failed[0])
        if len(failed) < dist.get_world_size():
            message = f"rank {failed[0]}: {message}"
    elif error is None:
        return
    if error is not None and not isinstance(error, (UserError, OSError)):
        raise error  # a bug, or out of memory: keep its traceback
    raise error_class(message) from None


def _failed_ranks(failed: bool) -> list[int]:
    flags = torch.zeros(dist.get_world_size(), dtype=torch.int32)
    flags[dist.get_rank()] = int(failed)
    dist.all_reduce(flags)
    return flags.nonzero()[:, 0].tolist()


def _broadcast_text(text: str, *, source: int) -> str:
    buffer = torch.zeros(_MAX_MESSAGE_BYTES, dtype=torch.uint8)
    encoded = text.encode()[:_MAX_MESSAGE_BYTES]
    buffer[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    dist.broadcast(buffer, src=source)
    return bytes(buffer.tolist()).rstrip(b"\0").decode(errors="ignore")
