"""Which rows a step trains on: a pure function of the step, so that resuming needs no saved position."""

import hashlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BatchLoader:
    """Walks through the rows epoch after epoch, `batch_size` at a time, without leaving any out at an epoch's end.

    Example: 5 rows in batches of 2, not shuffled: steps 0, 1, 2, 3 are [0, 1], [2, 3], [4, 0], [1, 2]
    """

    num_rows: int
    batch_size: int
    """A batch larger than the data spans epochs, and holds rows more than once."""
    seed: int
    shuffle: bool
    """A new order in every epoch; False keeps the order of the file."""

    def __post_init__(self) -> None:
        assert self.num_rows > 0, self.num_rows
        assert self.batch_size > 0, self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every row was used at least once, rounded up."""
        return -(-self.num_rows // self.batch_size)

    def indices(self, step: int) -> list[int]:
        """The rows of a step, counted from 0."""
        chosen: list[int] = []
        position = step * self.batch_size
        while len(chosen) < self.batch_size:
            epoch, offset = divmod(position + len(chosen), self.num_rows)
            chosen += self._order(epoch)[offset : offset + self.batch_size - len(chosen)].tolist()
        return chosen

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.num_rows)
        # Hashed rather than added, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
        digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        return torch.randperm(self.num_rows, generator=generator)
