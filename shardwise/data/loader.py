"""Picks the rows that a step trains on: a pure function of how many were taken before."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.config import DataError
from shardwise.console import warn


@dataclass(slots=True)
class BatchLoader:
    """Walks through the rows epoch after epoch, `batch_size` at a time, without leaving any out at an epoch's end.

    Example: 5 rows in batches of 2, not shuffled: behind 0, 2, 4 and 6 rows come [0, 1], [2, 3], [4, 0] and [1, 2]
    """

    num_rows: int
    batch_size: int
    """A batch larger than the data spans epochs, and holds rows more than once."""
    seed: int
    shuffle: bool
    """A new order in every epoch; False keeps the order of the file."""
    _order: "RowOrder" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.num_rows > 0, self.num_rows
        assert self.batch_size > 0, self.batch_size
        self._order = RowOrder(num_rows=self.num_rows, seed=self.seed, shuffle=self.shuffle)

    def indices(self, num_taken: int) -> list[int]:
        """The rows of the batch behind the first `num_taken`, counted through all epochs."""
        return [self._order.row(num_taken + place) for place in range(self.batch_size)]


def steps_of(num_epochs: int, *, num_rows: int, batch_size: int) -> int:
    """Returns the number of steps in `num_epochs`; the last batch is filled up with rows of the next epoch."""
    return -(-num_rows * num_epochs // batch_size)


@dataclass(slots=True, kw_only=True)
class RowOrder:
    """The order of rows over all epochs, as a function of the position."""

    num_rows: int
    seed: int
    shuffle: bool
    _epoch: int = field(default=-1, init=False, repr=False, compare=False)
    _rows: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    """The rows' order in the epoch that was asked for last: positions are asked for one after the other."""

    def row(self, position: int) -> int:
        """Returns the row at a position, counted from 0 through all epochs."""
        epoch, offset = divmod(position, self.num_rows)
        if not self.shuffle:
            return offset
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, _permutation(self.num_rows, self.seed, epoch)
        return self._rows[offset]


@dataclass(frozen=True, slots=True)
class RowRecord:
    """What a checkpoint keeps of the training rows of a run."""

    num_rows: Any
    """An int, or one for each source."""
    digest: str | None
    """Of their tokens; early checkpoints have none."""


def compare_rows(before: RowRecord, now: RowRecord, *, may_differ: bool) -> None:
    """Checks that a resumed run has as many training rows, of every source, as before: otherwise their order changes.
    Warns where they are as many, and have other tokens.

    Args:
        before: of the checkpoint.
        may_differ: whether trainer.resume_allow permits other rows: a warning then takes the error's place.
    Raises:
        DataError: there are more or fewer rows, and they may not differ.
    """
    saved, here = before.num_rows, now.num_rows
    if saved == here:
        if not may_differ and None not in (before.digest, now.digest) and before.digest != now.digest:
            warn(
                "the training rows have other tokens than in the run that is resumed, of the same files: another "
                "release of shardwise, transformers or tokenizers writes them in another way, or the chat template "
                "writes what changes, such as the date; what follows is not what an uninterrupted run would have "
                "learnt"
            )
        return
    told = f"the run that is resumed had {saved} training rows, now there are {here}"
    if not may_differ:
        raise DataError(
            f"{told}, which come in another order; bring back its data, allow others with trainer.resume_allow="
            "[data.train_files], or begin a run with its weights (model.path=PATH of the hf/ in its checkpoint, with "
            "another trainer.output_dir)"
        )
    warn(
        f"{told}: it goes on in their order, behind as many as it has taken, so in the epoch under way some may come "
        "again and others not at all; where trainer.num_epochs gives its length, these rows count"
    )


def _permutation(num_rows: int, seed: int, epoch: int) -> list[int]:
    # Hashed rather than added, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randperm(num_rows, generator=generator).tolist()
