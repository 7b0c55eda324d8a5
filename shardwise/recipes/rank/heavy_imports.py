"""Makes importing torch and transformers faster, which takes each process seconds."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.controller.signals import interruptible_imports


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Inside, imports run without the garbage collector, which would take a fifth of their time. It ignores what they
    create afterwards too, since that stays until the process ends."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        with interruptible_imports():
            yield
    finally:
        gc.freeze()
        gc.enable()
