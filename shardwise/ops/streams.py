"""Work on an accelerator that is handed to another thread."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def on_current_stream(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """Wraps `function` for one call in another thread, on the stream of `device` that is current now in this one.

    Every thread has a current stream of its own. On a stream other than the caller's, the function would read what is
    not computed yet and write what is still in use. Its results are ready in stream order, as always: a function that
    needs them on the host has to wait for them.
    """
    if device.type == "cpu":
        return function
    stream = torch.accelerator.current_stream(device)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with stream:
            return function(*args, **kwargs)

    return run
