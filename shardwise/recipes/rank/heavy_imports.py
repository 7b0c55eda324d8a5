"""Importing torch and transformers, which takes seconds of every process."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.controller.signals import interruptible_imports


@contextmanager
def heavy_imports() -> Iterator[None]:
    """What torch and transformers make when they are imported stays. The garbage collector need not look through it:
    not now, which takes a fifth of the time, and not later."""
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
