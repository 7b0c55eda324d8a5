"""Memory of the accelerator that torch keeps for later."""

import torch


def release_cached_blocks() -> None:
    """Gives the driver, and so other processes, the memory that no tensor of this process takes any more: what is
    freed stays with torch's allocator otherwise. Nothing on a machine without an accelerator."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
