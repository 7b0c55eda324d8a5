"""Tensors on their way from the host to an accelerator."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Like `tensor.to(device)`, without waiting for the device. A copy from pageable memory begins only when the device
    has finished all earlier work, and the caller would wait for that instead of queuing more."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # torch keeps the pinned memory until it is copied
