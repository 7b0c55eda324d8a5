"""Accelerator memory that torch's allocator keeps for later."""

import torch


def release_cached_blocks() -> None:
    """Gives memory that no tensor of this process uses any more back to the driver, and so to other processes;
    otherwise torch's allocator keeps it. Does nothing without an accelerator."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
