"""What a rank does while its worker is busy: write checkpoints, interrupt generation."""

import threading

from shardwise.engine import Links
from shardwise.recipes.checkpointing.checkpoint_writer import CheckpointWriter


class BackgroundWorker(CheckpointWriter):
    """Writes what the engines of this rank have staged, and interrupts what its rollout engine samples."""

    def __init__(self, rank: int, links: Links) -> None:
        """See CheckpointWriter."""
        super().__init__(rank, links)
        self.interruption = threading.Event()
        """Of the worker's `generate`."""

    def interrupt(self) -> None:
        """Sampling ends soon, until new weights have come."""
        self.interruption.set()
