"""What a rank does while its worker is busy: write checkpoints, interrupt generation."""

import threading

from shardwise.recipes.checkpointing.checkpoint_writer import CheckpointWriter


class BackgroundWorker:
    """What the controller commands on every rank alongside its worker, by the names of methods."""

    def __init__(self, writer: CheckpointWriter, interruption: threading.Event) -> None:
        """
        Args:
            writer: writes what the worker has staged.
            interruption: ends the worker's sampling soon once it is set; the worker clears it with new weights.
        """
        self.clear = writer.clear
        self.nonfinite_tensors = writer.nonfinite_tensors
        self.write = writer.write
        self.finish = writer.finish
        self.hash_files = writer.hash_files
        self.interrupt = interruption.set
