"""Tensors on their way from the host to an accelerator."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """As `tensor.to(device)`, without waiting for the device: from pageable memory a copy begins when the device has
    done all that it was given before, and the caller, who could give it more, would wait for that."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # torch keeps the pinned memory until it is copied
