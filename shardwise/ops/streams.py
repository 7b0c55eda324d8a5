"""Work on an accelerator that is handed to another thread."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def on_current_stream(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """For one call in another thread: `function`, on the stream of `device` that is current here and now.

    Every thread has a current stream of its own. On another one than the caller's it would read what is not computed
    yet, and write what is still in use. The results are on the device's stream as ever: whoever needs them on the host
    waits for them inside.
    """
    if device.type == "cpu":
        return function
    stream = torch.accelerator.current_stream(device)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with stream:
            return function(*args, **kwargs)

    return run
