"""What a run says on standard error while it goes on, and how things are counted, listed and placed in words."""

import os
import socket
import sys
from collections.abc import Sequence


def tell(text: str) -> None:
    """Prints one line, at once."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Prints a line about something that is wrong but does not stop the run."""
    tell(f"warning: {text}")


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 rank", "2 ranks", "3 micro-batches"."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"


def listed(names: Sequence[str], *, most: int = 3) -> str:
    """Returns the first names, and how many others there are: "a, b, c and 2 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def on_host() -> str:
    """Returns " on HOST", after the name of this rank, where torchrun has started ranks on several hosts, else ""."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    is_alone = os.environ.get("LOCAL_WORLD_SIZE", num_ranks) == num_ranks
    return "" if is_alone else f" on {socket.gethostname()}"
