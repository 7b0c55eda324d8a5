"""Failures that all ranks share, so that no rank goes on into a collective that another will never enter; and those of
the file system, told by their folder."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.config import ExportError, UserError
from shardwise.console import on_host

_MAX_MESSAGE_BYTES = 4096
_IN_RUST = re.compile(r"\(os error \d+\)$")
"""Matches the message of the plain Exception that tokenizers raises for an error of the file system."""


@contextmanager
def raised_on_every_rank(*error_classes: type[UserError]) -> Iterator[None]:
    """Collective over all ranks at the end of the body; the body itself must contain no collectives.

    For code that may fail on one rank alone (its disk, its copy of a file). Without a process group it only turns an
    error of the file system into a UserError.

    Args:
        error_classes: the classes that may be raised. An error of another class is raised as the first of them.
    Raises:
        error_classes: the body failed on at least one rank. Class and message are those of the first such rank, which
            the message names, with its host if there are several, unless the body failed on all.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    _raise_together(error, error_classes)


def _raise_together(error: Exception | None, error_classes: Sequence[type[UserError]]) -> None:
    message = (
        "" if error is None else str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    )
    kind = error_classes.index(type(error)) if type(error) in error_classes else 0
    if dist.is_initialized():
        failed = _failed_ranks(None if error is None else kind)
        if not failed:
            return
        first, kind = next(iter(failed.items()))
        message = _broadcast_text(message, source=first)
        if len(failed) < dist.get_world_size():
            message = f"rank {first}{_broadcast_text(on_host(), source=first)}: {message}"
    elif error is None:
        return
    if error is not None and not isinstance(error, (UserError, OSError)):
        raise error  # a bug, or out of memory: keep its traceback
    shared = error_classes[kind](message)
    shared.is_shared = True
    raise shared from None


def _failed_ranks(kind: int | None) -> dict[int, int]:
    """Failed rank -> index of its error's class, in the order of the ranks."""
    flags = torch.zeros(dist.get_world_size(), dtype=torch.int32)
    flags[dist.get_rank()] = 0 if kind is None else 1 + kind
    dist.all_reduce(flags)
    return {rank: flag - 1 for rank, flag in enumerate(flags.tolist()) if flag}


def _broadcast_text(text: str, *, source: int) -> str:
    buffer = torch.zeros(_MAX_MESSAGE_BYTES, dtype=torch.uint8)
    encoded = text.encode()[:_MAX_MESSAGE_BYTES]
    buffer[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    dist.broadcast(buffer, src=source)
    return bytes(buffer.tolist()).rstrip(b"\0").decode(errors="ignore")


@contextmanager
def named_failures(folder: Path) -> Iterator[None]:
    """Raises an error of the file system in the body as an ExportError that names the folder and what may help."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and not _IN_RUST.search(str(error)):
            raise
        remedy = "free space there, or choose a folder that every rank can write to"
        if isinstance(error, FileNotFoundError):
            remedy = "something has removed or moved it since, or its disk is not mounted any more"
        raise ExportError(f"{folder} cannot be written: {error}; {remedy}") from None


@contextmanager
def written_on_every_rank(folder: Path) -> Iterator[None]:
    """Collective like `raised_on_every_rank`, for a body that writes files into the folder or hashes those that were
    written there: what fails on one rank is an ExportError on all, with the remedies of `named_failures`."""
    with raised_on_every_rank(ExportError), named_failures(folder):
        yield
