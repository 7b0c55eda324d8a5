"""What a rank does while its worker is busy: write checkpoints, interrupt generation."""

import threading

from shardwise.recipes.checkpointing.checkpoint_writer import CheckpointWriter
from shardwise.types import Connections


class BackgroundWorker(CheckpointWriter):
    """Writes what the engines of this rank have staged, and interrupts what its rollout engine samples."""

    def __init__(self, rank: int, links: Connections) -> None:
        """See CheckpointWriter."""
        super().__init__(rank, links)
        self.interruption = threading.Event()
        """Interrupts the worker's `generate` when it is set."""

    def interrupt(self) -> None:
        """Makes sampling end soon; it stays interrupted until new weights have come."""
        self.interruption.set()
